"""The process group of one model, beside the one that it was made for.

[Note: Dropped groups] A model that is dropped without `close()` is collected at another moment on every rank, in the
middle of anything. Its group cannot end there: a rank that ends its part closes the connections of ranks that may
still use the model, and gloo waits for collectives that are open, which may need this very rank. So the collector only
notes the group. Where ranks meet without a model in use, when one is made or closed, they tell one another the names
of the groups that they have dropped, and end those that all of their ranks have dropped. A collective that one rank
never joined fails on the other ranks once that rank has ended its part; until then theirs wait.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_OPEN_S = 1.0  # how long to wait for other ranks to end their parts, which they do at the same point
_POLL_S = 0.002


@dataclass(eq=False)
class _Part:
    """This rank's part of a group."""

    name: str
    ranks: tuple[int, ...]  # global ones
    open: set[dist.Work] = field(default_factory=set)  # collectives of whose end this rank does not know
    is_left: bool = False  # by all ranks

    def try_to_end(self, seconds: float) -> bool:
        """End this part of a group that all ranks have left, unless collectives stay open for so long. Local."""
        deadline = time.monotonic() + seconds
        while not all(map(_is_over, self.open)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        self.open.clear()
        _end(self.name, c10d._abort_process_group)  # unlike `destroy_process_group`, it is local on every backend
        return True


def _is_over(work: dist.Work) -> bool:
    try:
        return work.is_completed()
    except RuntimeError:  # it failed: some backends raise what it failed with
        return True


_dropped: list[_Part] = []  # of groups that this rank has dropped, and that have not ended


class OwnGroup:
    """A process group of the parent's ranks and backends. Collective over these ranks, and no others.

    name: what no group of these ranks was ever called, the same on all of them. The ranks find one another under it
    in the store. `dist.new_group(use_local_synchronization=True)` derives a name from the number of groups that live
    in the process: after a group has ended, the next one would get its name, and find its addresses; and ranks of
    which one has a group more would wait for one another under different names.
    """

    def __init__(self, parent: dist.ProcessGroup, name: str, timeout: timedelta) -> None:
        ranks = dist.get_process_group_ranks(parent)
        self._part = _Part(name, tuple(ranks))
        self.group = _connect(parent, name, ranks, timeout)
        self._drop = weakref.finalize(self, _dropped.append, self._part)
        self._drop.atexit = False  # a process that ends takes its groups with it

    @property
    def open(self) -> set[dist.Work]:
        """Collectives that were launched, and of whose end this rank does not know. Its user adds and removes them."""
        return self._part.open

    def close(self) -> None:
        """End the group, with its threads and sockets, after all of its collectives. Collective."""
        self._drop.detach()
        _end(self._part.name, dist.destroy_process_group)

    def drop(self) -> None:
        """Leave the end to the point where all ranks have dropped the group. Local."""
        self._drop()

    def leave(self) -> None:
        """End the group, whatever is open in it. Local, but all ranks do it at the same point."""
        self._drop()
        self._part.is_left = True
        if self._part.try_to_end(_OPEN_S):
            _dropped.remove(self._part)


def dropped() -> list[str]:
    """The names of the groups that this rank has dropped and that have not ended."""
    return [part.name for part in _dropped[:]]  # a copy: the collector may append to the list at any moment


def end_dropped(by_rank: Mapping[int, set[str]]) -> None:
    """End the groups that all of their ranks have dropped. by_rank: what `dropped()` gives, by global rank.

    Local, but all these ranks do it at the same point, and in one order.
    """
    for part in sorted(_dropped[:], key=lambda part: part.name):
        wait_s = 0.0 if part.is_left else _OPEN_S
        part.is_left = part.is_left or all(part.name in by_rank.get(rank, ()) for rank in part.ranks)
        if part.is_left and part.try_to_end(wait_s):
            _dropped.remove(part)


def _end(name: str, end: Callable[[dist.ProcessGroup], None]) -> None:
    """Take the group from torch's tables, which hold the last reference. Nothing, if the user has ended it already."""
    for group, its_name in list(c10d._world.pg_names.items()):
        if its_name == name:
            end(group)


def _connect(parent: dist.ProcessGroup, name: str, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    backend, _ = c10d._world.pg_map[parent]
    whole = c10d._get_default_group()
    own: dist.ProcessGroup
    own, _ = c10d._new_process_group_helper(
        len(ranks),
        parent.rank(),
        ranks,
        backend,
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=timeout,
        device_id=whole.bound_device_id,
        group_desc="gemini",
    )
    c10d._world.pg_group_ranks[own] = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    return own
