"""The connection to the store, which a lost network would let a rank wait for without end.

A rank looks at the store for failures of others. Where the link to the rank that holds it is cut, nothing comes back:
torch waits for an answer in C++, and the system sends the question again for a quarter of an hour. A socket that gives
up earlier ends that wait with an error, as if the rank that holds the store were gone.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

_OPEN = Path("/proc/self/fd")


def give_up_after(store: Any, seconds: float) -> None:
    """What this rank sends to the store may stay unanswered by the other host's system for so long. Local.

    A slow rank is no such host. Does nothing for stores without a connection, and on systems other than Linux.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore) or not _OPEN.is_dir():
        return
    for each in list(_OPEN.iterdir()):
        with suppress(OSError):  # no socket, not connected, or closed since
            if not os.readlink(each).startswith("socket:"):
                continue
            # A second number for the same socket: Python would close torch's.
            with socket.socket(fileno=os.dup(int(each.name))) as link:
                if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] == store.port:
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
