"""The process group that carries the collectives of one model: it is opened, replaced after a failure, and ended."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gemini.ranks import own_devices
from gemini.ranks.own_group import OwnGroup
from gemini.ranks.watchdog import Watchdog
from sharding import Collectives


class Connection:
    """The connection of this rank to the others.

    It has a group of its own: a collective that a failure left open must not be matched with one of the user's.
    """

    def __init__(
        self, parent: dist.ProcessGroup | None, watch: Watchdog | None, rank_timeout_s: float, device: torch.device
    ) -> None:
        """watch: what waits for collectives. None on one rank, which needs no group."""
        self.works: set[dist.Work] = set()  # launched collectives that this rank does not know to be over
        self._parent = parent
        self._watch = watch
        # Longer than the watchdog's, so that the watchdog is first to report a lost rank, with its place in the step.
        self._timeout = timedelta(seconds=rank_timeout_s + 60)
        self._device = device
        self._own: OwnGroup | None = None
        if parent is not None and watch is not None:
            own_devices.announce(parent, device)

    @property
    def is_open(self) -> bool:
        """There is a group. One rank never has one."""
        return self._own is not None

    def open(self) -> Collectives:
        """The collectives of a group that was just made. Collective. Raises UnsupportedError if ranks share a GPU."""
        if self._parent is None or self._watch is None:
            return Collectives(None)
        self._watch.join()
        own_devices.refuse_shared(self._parent, self._device)
        self._own = OwnGroup(self._parent, self._watch.name, self._timeout)
        self.works = self._own.open
        return Collectives(self._own.group, self._wait, self._device)

    def replace(self, collectives: Collectives) -> Collectives:
        """The collectives of another group of the same ranks, after a failure that every rank caught. Collective."""
        collectives.abort()
        before = self._own
        others = self.open()
        if before is not None:
            before.abort()  # `open` has waited for all ranks: each ends its part here
        return others

    def close(self, collectives: Collectives) -> Collectives:
        """Give the group back, with its threads and sockets. Collective, except after a failure.

        Returns collectives of this rank alone.
        """
        if self._own is not None and self._watch is not None:
            if self._watch.failed:
                collectives.abort()
                self._own.drop()  # other ranks may not have heard of the failure yet
            else:
                collectives.barrier()  # gloo's destructor waits for the other ranks: leave together
                self._own.close()
        self._own, self.works = None, set()
        return Collectives(None)

    def _wait(self, work: dist.Work) -> None:
        assert self._watch is not None
        try:
            self._watch.wait(work)
        except BaseException:
            self.works.add(work)
            raise
