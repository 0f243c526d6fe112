"""The plan of a model: how it is cut into chunks, where their states rest, and the least budget.

Plans are made by pure functions: the same specs, settings, number of ranks and free bytes give the same plan, in any
process. They read no memory and ask no other rank. `search.py` makes the first plan of a model and chooses the chunk
size, `ShardedModel` carries it out, `estimate_memory` adds up its bytes, and `replan` follows a change of what is
trained.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict, Unpack

from gemini.errors import BudgetError
from gemini.placement import explain
from gemini.placement.budget import Budget
from gemini.placement.budget_use import least_device_bytes
from gemini.placement.chunk_facts import Packing, packings
from gemini.placement.demand import Demand, Kind, Placement
from gemini.placement.needs import uses_of
from gemini.placement.packed import packing_demand, trained_at_first
from gemini.placement.placing import place_in_budget
from gemini.placement.predict import Predicted, predict, predict_inference
from gemini.placement.refusals import advised
from gemini.placement.specs import ModelSpec, OperatorSpec
from gemini.settings import Settings


@dataclass(frozen=True)
class Plan:
    """All decisions for a model, as one value, equal on all ranks. Another set of trained weights has another plan.

    `plan_model`, `plan_inference` and `replan` make plans; `model.plan` and `estimate_memory(...).plan` show them.

    Args:
        spec: the description of the model.
        settings: what the user chose.
        world_size: the number of ranks.
        budget: model data that a rank's device and host may hold, in bytes.
        packing: the chunks, their size in bytes, and what the search for that size found.
        trained: whether each weight is trained, in the order of the chunks.
        demand: the bytes that each chunk needs on one rank.
        placement: the tier of each state of each chunk, and the number of slots.
        hash: a 32-bit hash of everything that decides the order of collectives, which ranks compare.
        is_first: the plan was made for wrapping, when the chunk size could still be chosen.
        offloaded: states that rest on the host until the model is used again, against the policy.
        infers: the plan treats all weights as frozen. Another plan replaces it when training begins.
    """

    spec: ModelSpec
    settings: Settings
    world_size: int
    budget: Budget
    packing: Packing
    trained: tuple[bool, ...]
    demand: Demand
    placement: Placement
    hash: int
    is_first: bool = True
    offloaded: frozenset[Kind] = frozenset()
    infers: bool = False

    @property
    def policy(self) -> str:
        """The name of the placement policy."""
        return self.settings.policy.name

    @property
    def budget_bytes(self) -> int | None:
        """Model data that the device may hold on each rank. None: no bound."""
        return self.budget.device

    @cached_property
    def device_bytes(self) -> int:
        """Model data that the device holds at its peak on each rank."""
        return self.placement.device_bytes(self.demand)

    @cached_property
    def host_bytes(self) -> int:
        """Bytes at rest on the host on each rank."""
        return self.placement.host_bytes(self.demand)

    @cached_property
    def use_order(self) -> tuple[tuple[int, ...], ...]:
        """The chunks that each operator uses, by index, in the order in which a first forward is expected."""
        return uses_of(self.packing.chunks, self.spec)

    @cached_property
    def minimum_bytes(self) -> int | None:
        """The least `model_data_memory` with which there is a plan, given a host with room for the rest.

        The minimum over all chunk sizes, unless the settings name one or the chunks exist already. None if a user's
        policy refuses without saying what it needs.
        """
        if self.is_first:
            return least_of_all_packings(self.spec, self.settings, self.world_size, self.infers, self._most_states)
        return self.packed_minimum_bytes

    @property
    def _most_states(self) -> int:
        return max((chunk.optim_states for chunk in self.demand.chunks), default=0)

    @cached_property
    def packed_minimum_bytes(self) -> int | None:
        """The least `model_data_memory` for the chunks of this plan. None: likewise."""
        return least_device_bytes(self.demand, self.settings.policy)

    @cached_property
    def predicted(self) -> Predicted:
        """The bytes that each training step moves and holds; of a plan for inference, those of each forward.

        A step has `gradient_accumulation_steps` micro-batches, or as many as earlier steps have shown, at first one.
        Exact for rank 0 of a model whose operators run once each, in order, and whose backward reads all weights behind
        the first trained operator. `gemini.placement.predict` takes a recorded schedule for other models.
        """
        return predict_inference(self) if self.infers else predict(self)

    def explain(self) -> str:
        """The plan in sentences, one per line, with bytes of one rank.

        They tell what was chosen and why, where states rest, what a step moves, what another budget would change, and
        the minimum.

        Local; raises nothing.
        """
        settings, demand = self.settings, self.demand
        if not demand.chunks:
            return "No weights are planned: nothing rests on the device or on the host, and nothing moves."
        # Each of these packs the model again, as a rule with many chunk sizes, so they are computed only for this text.
        others = {
            words: least_of_all_packings(self.spec, changed, self.world_size, self.infers, self._most_states)
            for words, changed in explain.other_choices(settings, self.is_first)
        }
        # The operator whose chunks take the most slot bytes bounds the minimum: it needs all of them at once.
        slot_bytes = [
            sum(demand.slot_bytes[demand.chunks[index].oversize] for index in chunks) for chunks in self.use_order
        ]
        at = max(range(len(slot_bytes)), key=slot_bytes.__getitem__)
        lines = [
            *explain.chunks_in_words(
                self.packing, settings.stage, self.world_size, self.policy, self.infers, self.is_first
            ),
            *explain.states_in_words(demand, self.placement, self.budget),
            *explain.moves_in_words(demand, self.placement, self.world_size, self.infers),
            *explain.predicted_in_words(self.predicted, demand.micro_batches, self.infers),
            *explain.budgets_in_words(demand, self.placement, self.budget, settings.policy),
            *explain.minimum_in_words(
                self.minimum_bytes,
                others,
                (self.spec.operators[at].name or "the model", slot_bytes[at]),
                self.infers,
                self.is_first,
            ),
        ]
        return "\n".join(lines)


class PlanChanges(TypedDict, total=False):
    """The arguments of `replan` that may differ from the plan before."""

    operators: tuple[OperatorSpec, ...]
    settings: Settings
    budget: Budget
    infers: bool
    micro_batches: int  # per step, if the settings do not fix the number
    optim_states: Sequence[int]  # states per element that the optimizer keeps, by chunk index
    is_by_default: bool  # a refusal says what the default leaves to activations


def replan(
    before: Plan,
    trained: Sequence[bool],
    kept: Mapping[int, frozenset[Kind]],
    **changes: Unpack[PlanChanges],
) -> Plan:
    """The plan for the same chunks after trained weights, operators or budgets change, or training begins. Local.

    trained: for each weight, in the order of the chunks. kept: states that frozen chunks still have, by chunk index; of
    all chunks if the model only infers.
    Raises BudgetError if the device budget is too small. The caller checks the room on the host.
    """
    spec = before.spec
    if "operators" in changes:
        spec = replace(spec, operators=changes["operators"])
    settings, budget = changes.get("settings", before.settings), changes.get("budget", before.budget)
    infers = changes.get("infers", before.infers)
    micro_batches = changes.get("micro_batches", before.demand.micro_batches)
    # A later plan counts the states of the one before: an optimizer that keeps other numbers than Adam may be there
    # already.
    states = changes.get("optim_states", [chunk.optim_states for chunk in before.demand.chunks])
    packing, size = before.packing, before.world_size
    try:
        plan = plan_packing(spec, settings, size, budget, packing, trained, kept, infers, micro_batches, states)
    except BudgetError as error:
        # Until training begins no step has shown its activations, so the budget leaves them the default.
        is_by_default = changes.get("is_by_default", before.is_first and budget == before.budget)
        # The advised error contains the text of the first one, which a chained traceback would repeat.
        raise advised(error, spec, settings, is_by_default) from None
    # The chunks exist already, so that the minimum of this plan is that of their size alone.
    return replace(plan, is_first=False)


def plan_packing(
    spec: ModelSpec,
    settings: Settings,
    world_size: int,
    budget: Budget,
    packing: Packing,
    trained: Sequence[bool],
    kept: Mapping[int, frozenset[Kind]],
    infers: bool = False,
    micro_batches: int = 1,
    optim_states: Sequence[int] | None = None,
) -> Plan:
    """The plan with the chunks of `packing`. Local. Raises BudgetError if the device budget is too small.

    The arguments are those of `replan`, and fields of `Plan`. optim_states: by chunk index. None: Adam's.
    """
    # A plan for inference counts memory as if all weights were frozen. `trained` itself goes into the plan, for the one
    # that replaces it when training begins.
    counted = [False] * len(trained) if infers else trained
    room = budget.host
    demand = packing_demand(packing, spec, counted, kept, settings, world_size, room, micro_batches, optim_states)
    return plan_demand(spec, settings, world_size, budget, packing, trained, demand, infers)


def plan_demand(
    spec: ModelSpec,
    settings: Settings,
    world_size: int,
    budget: Budget,
    packing: Packing,
    trained: Sequence[bool],
    demand: Demand,
    infers: bool = False,
) -> Plan:
    """`plan_packing` of chunks whose demand is known."""
    # The host's budget is no bound here: it is in the demand, where a policy may prefer placements that keep to it.
    # Callers check the room on the host.
    demand, placement = place_in_budget(demand, budget.device, settings.policy)
    hash_ = hash_of(packing, placement, settings, trained, demand.scratch_bytes)
    return Plan(spec, settings, world_size, budget, packing, tuple(trained), demand, placement, hash_, infers=infers)


def hash_of(
    packing: Packing, placement: Placement, settings: Settings, trained: Sequence[bool], scratch_bytes: int
) -> int:
    """A 32-bit hash of everything that decides the order of collectives."""
    # What a collective sends depends on where the weights are in a chunk and on how ranks divide it.
    chunks = [(chunk.names, chunk.offsets, chunk.layout) for chunk in packing.chunks]
    each = {id(homes): homes for homes in placement.homes}  # which thousands of chunks share
    words = {key: repr(homes) for key, homes in each.items()}
    # The text is that of `repr(placement.homes)`, where a tuple of one element has a comma. Equal chunks share a dict,
    # so each distinct one is put into words once.
    homes = f"({', '.join(words[id(homes)] for homes in placement.homes)}{',' * (len(placement.homes) == 1)})"
    # Gradient slots are left out: a gradient that spills changes no collective.
    # A set has no order of its own, hence the sort.
    # Scratch is in it, because it decides in how many tiles a gradient is exchanged.
    placed = f"({placement.num_slots}, {homes}, {sorted(placement.kept)}, {scratch_bytes})"
    # Ranks compare this number. Python's own `hash` of a text differs between processes.
    return zlib.crc32(f"({chunks}, {placed}, {settings.shared()!r}, {tuple(trained)})".encode())


def kept_at_first(spec: ModelSpec, packing: Packing) -> dict[int, frozenset[Kind]]:
    """The masters that even inference must keep: those that hold more than the 16-bit weights rounded from them."""
    # The masters of all other weights can be made from the weights when training begins.
    exact = {weight.name for weight in spec.weights if weight.trainable and weight.is_rounded}  # membership only
    masters = frozenset((Kind.MASTER,))
    return {chunk.index: masters for chunk in packing.chunks if not exact.isdisjoint(chunk.names)}


def least_of_all_packings(
    spec: ModelSpec, settings: Settings, world_size: int, infers: bool, optim_states: int
) -> int | None:
    """The least bytes of model data that the device needs, over all chunk sizes that may be chosen. Local.

    infers: for inference, else for training with an optimizer that keeps `optim_states` states per element. None: a
    user's policy does not say it.
    """
    found = []
    for packing in packings(spec, settings, world_size):
        # This is the minimum of a model that is being wrapped, in which frozen chunks have no states to keep.
        trained, kept = trained_at_first(spec, packing), {}
        if infers:
            trained, kept = [False] * len(trained), kept_at_first(spec, packing)
        states = [optim_states] * len(packing.chunks)
        demand = packing_demand(packing, spec, trained, kept, settings, world_size, optim_states=states)
        found.append(least_device_bytes(demand, settings.policy))
    # A user's policy may name its least for some sizes only.
    return min((num_bytes for num_bytes in found if num_bytes is not None), default=None)
