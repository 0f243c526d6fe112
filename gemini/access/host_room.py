"""What the host has for one model by now, where a plan asks for more of it than there was.

Host memory is read when a model is wrapped, beside whatever the script holds then: a checkpoint that was just loaded, a
dataset. Much of it may be free when training begins, so nothing is refused for a reading of the past.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.manager.chunk_manager import ChunkManager
from gemini.monitor.host import HostSource, share_of_host
from gemini.placement.budget import Budget


class HostRoom:
    """Of one model."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._ledger = manager.memory.host.ledger
        self._communicator = manager.communicator
        self._source = HostSource()

    def read(self, budget: Budget) -> Budget:
        """`budget`, with what the host has now if that is more, the least over ranks. Collective; raises nothing.

        A bound that the user gave stays.
        """
        plan = self._manager.plan
        if budget.host is None or plan.settings.host_memory is not None:
            return budget
        room = share_of_host(self._source.read().available_bytes) + self._ledger.total_bytes
        (agreed,) = self._communicator.least((room,), "free host memory")
        return replace(budget, host=max(budget.host, agreed))
