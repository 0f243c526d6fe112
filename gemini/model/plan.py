"""The plan of one rank: how its model is cut into chunks, and where their states rest. Local; allocates nothing.

Without a chunk size from the user the cheapest one that the budgets allow is taken, so that what fits with some size is
never refused. All of it follows from shapes, arguments and budgets, which ranks agree on before, so plans are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gemini.chunks.chunk import Chunk
from gemini.errors import BudgetError
from gemini.model import wrap
from gemini.model.operators import FoundOperator
from gemini.model.precision import ModulePrecision
from gemini.placement.budget import Budget, FreeBytes
from gemini.placement.chunk_size import SearchReport, candidates
from gemini.placement.demand import WRAPPED_KINDS, Demand, Placement
from gemini.placement.packing import PackedChunk, Packer
from gemini.placement.policy import resolve_policy
from gemini.settings import Settings
from sharding import resolve_strategy


@dataclass(frozen=True)
class Packing:
    """How the model is cut into chunks, and what the search for the chunk size says of it."""

    chunks: tuple[PackedChunk, ...]
    chunk_bytes: int
    searched: SearchReport | None  # None for a size that the user gave


@dataclass(frozen=True)
class Plan:
    """What was decided for this rank before the first step, and is decided anew when other chunks are trained."""

    packing: Packing
    demand: Demand
    placement: Placement
    policy: str
    budget: Budget
    hash: int

    @property
    def budget_bytes(self) -> int | None:
        """Model data that the device may hold. None: no bound."""
        return self.budget.device


class Planner:
    """Makes the plans of one model."""

    def __init__(
        self,
        module: nn.Module,
        operators: list[FoundOperator],
        weights: ModulePrecision,
        settings: Settings,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self._by_name = dict(module.named_parameters())
        self._operators = operators
        self._settings = settings
        self._weights = weights
        self._strategy = resolve_strategy(settings.shard_strategy)
        self._policy = resolve_policy(settings.tensor_placement_policy)
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self.inputs = wrap.packing_inputs(operators, self._by_name, self._weights)

    def plan(self, free: FreeBytes) -> tuple[list[Chunk], Plan]:
        """Chunks without memory, and their plan.

        Raises BudgetError with the bytes that are needed: the least over all chunk sizes, if those are searched.
        """
        chunk_numel, budget = self._settings.chunk_size, Budget.of(self._settings, free)
        refused: list[BudgetError] = []
        for packing in self._packings(chunk_numel):
            chunks = wrap.make_chunks(
                packing.chunks,
                self._by_name,
                self._operators,
                self._settings,
                self._weights,
                self._device,
                self._rank,
            )
            try:
                plan = self._place(chunks, packing, budget)
                check_host_room(plan)
            except BudgetError as error:
                refused.append(error)
                continue
            return chunks, plan
        raise self._advised(_least(refused, is_searched=chunk_numel is None)) from None

    def replan(self, chunks: list[Chunk], before: Plan, flags: list[bool]) -> Plan:
        """For chunks as they say they are trainable, and parameters' flags. The packing stays. Raises BudgetError."""
        try:
            return self._place(chunks, before.packing, before.budget, flags)
        except BudgetError as error:
            raise self._advised(error) from None

    def _advised(self, error: BudgetError) -> BudgetError:
        """The refusal, with what a compiled module has to do with it."""
        compiled = [operator for operator in self._operators if operator.is_compiled]
        if not compiled or error.tier != "device":
            return error
        largest = max(compiled, key=lambda operator: sum(parameter.numel() for parameter in operator.parameters))
        advice = (
            f"{largest.name or 'The model'} is compiled, so that all of its chunks are needed at once: compile smaller "
            "modules inside it, such as its blocks, one by one"
        )
        return error.reworded(f"{error}. {advice}")

    def _packings(self, chunk_numel: int | None) -> Iterator[Packing]:
        packer = Packer(self.inputs, self._strategy, self._world_size)
        if chunk_numel is not None:
            itemsizes = [item.itemsize for operator in self.inputs for item in operator]
            chunk_bytes = chunk_numel * max(sorted(set(itemsizes)), key=itemsizes.count)
            yield Packing(packer.seal(packer.cut(chunk_bytes)), chunk_bytes, None)
            return
        for found, cuts in candidates(packer, self._world_size):
            yield Packing(packer.seal(cuts), found.chunk_bytes, found)

    def _place(self, chunks: list[Chunk], packing: Packing, budget: Budget, flags: list[bool] | None = None) -> Plan:
        if flags is None:
            flags = [managed.requires_grad for chunk in chunks for managed in chunk.parameters]
        demand = wrap.demand_of(chunks, self._operators, self._settings.stage, self._world_size)
        placement = self._policy.place(demand, budget.device)
        hash_ = wrap.plan_hash(packing.chunks, placement, f"{self._settings.shared()} trained={flags}")
        return Plan(packing, demand, placement, self._policy.name, budget, hash_)


def check_host_room(plan: Plan) -> None:
    """Raises BudgetError if the host cannot take what moves in; the device's budget was the placement's business."""
    needed, host_bytes = plan.placement.host_bytes(plan.demand, WRAPPED_KINDS), plan.budget.host
    if host_bytes is not None and needed > host_bytes:
        raise BudgetError(
            f"host: {needed} bytes of parameters, gradients and masters do not fit into the budget of "
            f"{host_bytes} bytes. Allow more with host_memory=, or let more rest on the device or on other ranks",
            tier="host",
            needed_bytes=needed,
            budget_bytes=host_bytes,
        )


def _least(refused: list[BudgetError], is_searched: bool) -> BudgetError:
    """The refusal that asks for least, over all chunk sizes; the host's least where some sizes fit the device."""
    known = [(error.needed_bytes, error) for error in refused if error.needed_bytes is not None]
    if not known:  # a policy of the user's, with words of its own
        return refused[0]
    on_host = [(needed, error) for needed, error in known if error.tier == "host"]
    needed, error = min(on_host or known, key=lambda one: one[0])
    if on_host:
        return error
    tried = f". {len(refused)} chunk sizes were tried: none needs less"
    advice = tried if is_searched else ", or make chunk_size= smaller"
    return error.reworded(f"{error}{advice}")
