"""Wrapping: a module's weights go into chunks, on all ranks or on none.

Ranks agree on the module, on what is free, and on the plan that follows from these, before anything moves. What fails
later is undone by `MovingOut`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist
from torch import nn

from gemini.access.released import ReleasedParameter
from gemini.building.link import built_link_of
from gemini.errors import BudgetError
from gemini.launch import ranks_of
from gemini.manager.chunk_manager import ChunkManager
from gemini.memory.devices import choose_tiers
from gemini.memory.memory import Memory
from gemini.model.budgets import bytes_freed, read_free
from gemini.model.make_chunks import make_chunks
from gemini.model.move_in import close_empty, move_buffers_in, move_in, stores_of
from gemini.model.move_out import MovingOut
from gemini.model.operators import find_operators
from gemini.model.precision import weights_of
from gemini.model.specs import describe, model_spec
from gemini.monitor.device import source_of
from gemini.placement.inference import plan_first
from gemini.placement.packed import Packed
from gemini.placement.placing import PLACE_ALIKE, placement_in_words
from gemini.placement.plan import Plan
from gemini.ranks.communicator import Communicator
from gemini.ranks.position import StepPosition
from gemini.settings import Settings


class Wrapping:
    """One module that is being wrapped, on this rank. Collective to make: it opens the model's process group."""

    def __init__(
        self,
        module: nn.Module,
        by_name: dict[str, nn.Parameter],
        ignored: Collection[nn.Parameter],
        settings: Settings,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        """ignored: parameters of the module that go into no chunk. process_group: as of `ShardedModel`."""
        self.weights = weights_of(module, settings)
        process_group = ranks_of(process_group)
        device_tier, host_tier = choose_tiers(settings.device)
        self._device = source_of(settings.device)
        self.gathers = settings.gathers(1 if process_group is None else process_group.size())
        self._places: dict[nn.Parameter, int] = {}
        self.operators = find_operators(module, self.gathers, self._places, ignored)
        position = StepPosition(["", *(operator.name for _, operator in self.operators)])
        self.communicator = Communicator(process_group, position, settings.rank_timeout, device_tier.device)
        self._memory = Memory(device_tier, host_tier)
        self._back = MovingOut(self.communicator, self._memory)
        self._module = module
        self._by_name = by_name
        self._settings = settings

    def plan(self) -> tuple[Plan, BudgetError | None]:
        """The plan that all ranks have agreed on; if it is one for inference, why training is refused. Collective.

        Nothing has moved. Raises BudgetError if the model does not fit, and DivergenceError if ranks differ.
        """
        communicator, settings, by_name = self.communicator, self._settings, self._by_name
        links = ((name, built_link_of(parameter)) for name, parameter in by_name.items())
        built = {name: link for name, link in links if link is not None}
        self._back.note_stores(stores_of(built.values(), communicator.ranks))
        spec, given = model_spec(by_name, self.operators, self._places, self.weights), settings.shared()
        communicator.agree(repr((given, spec, [*built])).encode(), "the model", describe(given, spec, [*built]))
        device = self._memory.device.device
        own = bytes_freed(self._places, device, self._device), 0
        free = read_free(settings, own, communicator, self._device)
        first, refused = plan_first(Packed(spec, settings, communicator.world_size), settings, free)
        self._back.note_chunks(make_chunks(first, by_name, device, communicator.rank))
        # A policy of the user's was compared by its name alone: its placement may still differ by rank.
        had = placement_in_words(first.placement, first.budget_bytes)
        communicator.agree(first.hash.to_bytes(4, "little"), "the plan", had, PLACE_ALIKE)
        communicator.follow_plan(first.hash)
        self._memory.allow(first.budget)
        return first, refused

    def move_weights(self, plan: Plan) -> ChunkManager:
        """Move weights and buffers to where the plan has them. Collective. `undo` brings them back."""
        communicator, memory, back = self.communicator, self._memory, self._back
        for store in back.stores:
            # From here on ranks that gather what was built hear of a failure on any rank.
            store.go_over(communicator)
            store.release_all()  # brings edits home before anything moves
        move_buffers_in(self._module, communicator, memory.device, back.moves)
        move_in(back.chunks, plan.placement, plan.demand, communicator, memory, back.moves)
        return ChunkManager(back.chunks, memory, plan, communicator, ReleasedParameter, self._device)

    def end(self) -> None:
        """The module is wrapped. Collective."""
        # No rank returns before all are here: giving the weights back after a failure is collective.
        self.communicator.wait_for_all("model is wrapped")
        close_empty(self._back.stores, self.communicator)

    def undo(self, error: BaseException) -> None:
        """Give the module its weights back after `error`, of which all ranks know: it is as it was. Collective."""
        self._back.undo(error)
