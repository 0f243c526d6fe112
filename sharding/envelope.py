"""Envelopes: fixed-size messages in which ranks on gloo exchange a tag each, with a few bytes of data.

The first message of every collective has this size, whatever the collective is, see [Note: Tags] in collectives.py. On
gloo an exchange of these bytes takes as long as one of a tag alone, and two exchanges take twice as long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from .tag import Tag, TagMismatch

_HEADER = struct.Struct("<qqq")  # the tag's two words, and the number of bytes of the rank's data
_NUM_BYTES = 1024
MOST_TOLD_BYTES = _NUM_BYTES - _HEADER.size
"""Bytes of data that fit into an envelope."""


class Told(NamedTuple):
    """The data of all ranks, in rank order."""

    sizes: list[int]  # bytes of each rank's data
    data: list[bytes] | None  # None if some rank's data did not fit


class Envelopes:
    """The envelopes of one group. One exchange at a time."""

    def __init__(self, group: dist.ProcessGroup, wait: Callable[[dist.Work], None]) -> None:
        self._group = group
        self._wait = wait
        self._rank = group.rank()
        # Buffers made inside inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._sent = torch.zeros(group.size(), _NUM_BYTES // 8, dtype=torch.int64, device="cpu")
            self._received = torch.zeros_like(self._sent)

    def exchange(self, tag: Tag | None, data: bytes = b"") -> Told:
        """Send the tag and `data` to every rank. At most `MOST_TOLD_BYTES` of data fit. Collective.

        With a tag, raises `TagMismatch` on every rank, before any data of the other ranks is used.
        """
        words = (0, 0) if tag is None else tag.pack()
        own = (_HEADER.pack(*words, len(data)) + data[:MOST_TOLD_BYTES]).ljust(_NUM_BYTES, b"\0")
        # Row i goes to rank i: every rank gets the same envelope.
        self._sent.copy_(torch.frombuffer(bytearray(own), dtype=torch.int64))
        received, sent = self._received.view(-1), self._sent.view(-1)
        self._wait(dist.all_to_all_single(received, sent, group=self._group, async_op=True))
        every = self._received.numpy().tobytes()
        starts = range(0, len(every), _NUM_BYTES)
        headers = [_HEADER.unpack_from(every, start) for start in starts]
        if tag is not None and any(header[:2] != words for header in headers):
            raise TagMismatch(self._rank, tag, {rank: Tag.unpack(header[:2]) for rank, header in enumerate(headers)})
        # If one rank's data does not fit, all ranks see that, and the caller sends all data in another exchange.
        sizes = [header[2] for header in headers]
        if max(sizes) > MOST_TOLD_BYTES:
            return Told(sizes, None)
        firsts = (start + _HEADER.size for start in starts)
        return Told(sizes, [every[first : first + size] for first, size in zip(firsts, sizes, strict=True)])
