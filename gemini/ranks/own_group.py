"""The process group of one model, beside the group that the user made.

[Note: Dropped groups] A model that is dropped without `close()` is collected at a different moment on each rank, in the
middle of any function. Its group cannot end there: a rank that ends its part closes the connections of ranks that may
still use the model, and gloo waits for open collectives, which may need this very rank. So the collector only notes the
group. When a model is made or closed, ranks meet without a model in use: there they tell one another the names of the
groups that they have dropped, and end those that all of their ranks have dropped. A collective that one rank never
joined fails on the other ranks once that rank has ended its part; until then theirs wait.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_OPEN_S = 1.0  # time for the other ranks to end their parts, which they do at the same point
_POLL_S = 0.002


@dataclass(eq=False)
class _Part:
    """This rank's part of a group."""

    name: str
    ranks: tuple[int, ...]  # global ones
    open: set[dist.Work] = field(default_factory=set)  # collectives that may still run
    is_left: bool = False  # all ranks have left the group

    def try_to_end(self, seconds: float) -> bool:
        """End this part of a group that all ranks have left; False if a collective stays open for `seconds`. Local."""
        deadline = time.monotonic() + seconds
        while not all(map(_is_over, self.open)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        self.open.clear()
        # Unlike `destroy_process_group`, aborting is local on every backend.
        _end(self.name, c10d._abort_process_group)
        return True


def _is_over(work: dist.Work) -> bool:
    try:
        return work.is_completed()
    # Some backends raise here what the collective failed with.
    except RuntimeError:
        return True


# Groups that this rank has dropped and that have not ended.
_dropped: list[_Part] = []


class OwnGroup:
    """A process group of the parent's ranks and backends. Collective over these ranks only.

    name: a name that no group of these ranks ever had, equal on all of them. The ranks find one another by it in the
        store.

    `dist.new_group(use_local_synchronization=True)` derives a name from the number of groups that live in the process.
    After a group has ended, the next one would get its name and find its addresses, and ranks of which one has a group
    more would wait for one another under different names.
    """

    def __init__(self, parent: dist.ProcessGroup, name: str, timeout: timedelta) -> None:
        ranks = dist.get_process_group_ranks(parent)
        self._part = _Part(name, tuple(ranks))
        self.group = _connect(parent, name, ranks, timeout)
        self._drop = weakref.finalize(self, _dropped.append, self._part)
        # The process's groups end with it.
        self._drop.atexit = False

    @property
    def open(self) -> set[dist.Work]:
        """Launched collectives that this rank does not know to be over. The caller adds and removes them."""
        return self._part.open

    def close(self) -> None:
        """End the group, with its threads and sockets, after all of its collectives. Collective."""
        # The finalizer would list a group that has ended among the dropped ones.
        self._drop.detach()
        _end(self._part.name, dist.destroy_process_group)

    def drop(self) -> None:
        """Leave the group to be ended where all ranks have dropped it. Local."""
        self._drop()

    def abort(self) -> None:
        """End the group, whatever is open in it. Local, but all ranks call it at the same point."""
        self._drop()
        self._part.is_left = True
        if self._part.try_to_end(_OPEN_S):
            _dropped.remove(self._part)


def dropped() -> list[str]:
    """The names of the groups that this rank has dropped and that have not ended."""
    # A copy: the cycle collector may append to the list at any moment.
    return [part.name for part in _dropped[:]]


def end_dropped(by_rank: Mapping[int, set[str]]) -> None:
    """End the groups that all of their ranks have dropped. by_rank: the results of `dropped()`, by global rank.

    Local, but all these ranks call it at the same point, and end groups in the same order.
    """
    for part in sorted(_dropped[:], key=lambda part: part.name):
        # Collectives that were open at an earlier meeting have had this time: later meetings do not wait for them.
        wait_s = 0.0 if part.is_left else _OPEN_S
        part.is_left = part.is_left or all(part.name in by_rank.get(rank, ()) for rank in part.ranks)
        if part.is_left and part.try_to_end(wait_s):
            _dropped.remove(part)


def _end(name: str, end: Callable[[dist.ProcessGroup], None]) -> None:
    """Remove the group from torch's tables, which hold the last reference, unless the user has ended it already."""
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
    # `_new_process_group_helper` leaves this entry to its caller; rank translations read it.
    c10d._world.pg_group_ranks[own] = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    return own
