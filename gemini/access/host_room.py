"""Reads the host's free memory again if a plan needs more than there was.

Host memory is read when a model is wrapped, beside whatever the script holds then: a checkpoint that was just loaded, a
dataset. Much of that may be free when training begins, so an old reading refuses nothing.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.manager.chunk_manager import ChunkManager
from gemini.monitor.host import HostSource, share_of_host
from gemini.placement.budget import Budget


class HostRoom:
    """The host memory of one model on this rank."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._ledger = manager.memory.host.ledger
        self._communicator = manager.communicator
        self._source = HostSource()

    def read(self, budget: Budget) -> Budget:
        """`budget` with the host's current room if that is more, the minimum over ranks. Collective; raises nothing.

        A bound that the user gave stays.
        """
        plan = self._manager.plan
        if budget.host is None or plan.settings.host_memory is not None:
            return budget
        # What this model holds on the host already is not free, but it is its own to use.
        room = share_of_host(self._source.read().available_bytes) + self._ledger.total_bytes
        (agreed,) = self._communicator.least((room,), "free host memory")
        return replace(budget, host=max(budget.host, agreed))
