"""How plans are made, and follow one another."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypedDict, Unpack

from gemini.errors import BudgetError
from gemini.placement.budget import Budget, advised
from gemini.placement.demand import ChunkDemand, Demand, Kind, ModelSpec, OperatorSpec, Placement, Tier, format_bytes
from gemini.placement.host_room import expects_unannounced, has_host_room_for_steps, passing_host_bytes
from gemini.placement.needs import holding_sums, min_slots, packing_demand
from gemini.placement.packing import Packing
from gemini.placement.plan import Plan
from gemini.placement.policy import place_in_budget, slots_for, to_disk
from gemini.settings import Settings


class PlanChanges(TypedDict, total=False):
    """The arguments of `replan` that may differ from the plan before."""

    operators: tuple[OperatorSpec, ...]
    settings: Settings
    budget: Budget
    infers: bool
    micro_batches: int  # per step, if the settings do not fix the number
    optim_states: Sequence[float]  # states per element that the optimizer keeps, by chunk index
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
        raise advised(error, spec, settings, before.activation_fraction if is_by_default else None) from None
    # The chunks exist already, so that the minimum of this plan is that of their size alone.
    return replace(with_room_for_steps(plan), is_first=False, activation_fraction=before.activation_fraction)


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
    optim_states: Sequence[float] | None = None,
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
    spare: int = 0,
) -> Plan:
    """`plan_packing` of chunks whose demand is known. spare: see `to_disk`."""
    # The host's budget is no bound here: it is in the demand, where a policy may prefer placements that keep to it.
    # Callers check the room on the host.
    has_disk = settings.disk_path is not None
    demand, placement = place_in_budget(demand, budget.device, settings.policy, has_disk)
    if has_disk:
        placement = to_disk(demand, placement, budget.host, budget.disk, settings.disk_fraction, spare)
    hash_ = hash_of(packing, placement, settings, trained, demand.scratch_bytes)
    return Plan(spec, settings, world_size, budget, packing, tuple(trained), demand, placement, hash_, infers=infers)


# [Note: Unannounced backwards] A step may have a second backward that nobody has announced. It needs memory beside the
# plan: fp32 sums of 16-bit gradients, homes for gradients that lay in those of their parameters, and the host for
# gradients that find no slot. The device gives what it has left, and the host the rest. Where free memory bounds the
# host there usually is some. A host that the user has bounded with `host_memory=`, or that a disk lets chunks fill, may
# have none: the step would die in its middle, with the gradients lost. So what a second backward needs is kept free
# there: a disk takes more, or the sums get homes in the plan. If neither fits, training is refused before its first
# step, unless `gradient_accumulation_steps` says how many backwards there are.


def with_room_for_steps(plan: Plan, known_are_enough: bool = True) -> Plan:
    """`plan`, or another one for the same chunks whose host has room for what passes through it in a step.

    `plan` itself where there is none. See [Note: Unannounced backwards]. Local; raises nothing.

    known_are_enough: where unannounced backwards find no room, one with room for the steps that are known. False: the
        caller refuses that one, and it is not looked for, which takes a simulated step.
    """
    unannounced = expects_unannounced(plan)
    if has_host_room_for_steps(plan, unannounced):
        return plan
    others = list(_roomier(plan, unannounced))
    found = [each for each in others if has_host_room_for_steps(each, unannounced)]
    # Room for the steps that are known is better than none.
    if known_are_enough and not found:
        found += [each for each in (plan, *others) if has_host_room_for_steps(each)]
    return found[0] if found else plan


def _roomier(plan: Plan, unannounced: bool) -> Iterator[Plan]:
    """Other plans in place of `plan`, those first which cost a step with one backward least."""
    bases: list[Plan | None] = [plan]
    if unannounced:
        bases.append(_planned_again(plan, holding_sums(plan.demand, plan.packing.chunks, plan.settings.stage)))
    for base in bases:
        if base is None:
            continue
        if base is not plan:
            yield base
        # Room beside the plan takes nothing of the device: states leave the host for it.
        if plan.settings.disk_path is not None:
            more = _planned_again(base, base.demand, passing_host_bytes(base, unannounced))
            if more is not None:
                yield more


def _planned_again(plan: Plan, demand: Demand, spare: int = 0) -> Plan | None:
    """`plan` with another demand, or more of it on the disk. None: it does not fit the device or the disk."""
    its = plan.spec, plan.settings, plan.world_size, plan.budget, plan.packing, plan.trained
    try:
        again = plan_demand(*its, demand, plan.infers, spare)
    except BudgetError:
        return None
    return replace(again, is_first=plan.is_first, activation_fraction=plan.activation_fraction)


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


# -- When free memory has changed enough for another plan, and the budget of that plan. Pure functions of numbers.
#
# A reading moves by a little at every step. A model that followed each of them would do nothing but move, so that what
# is free has to change by more than a step of `_MARGIN` before states move in, and states that leave make room for as
# much again. The first reading of all is no such change: what it shows is followed to the byte.


_MARGIN = 0.02
"""Fraction of the budget by which a reading may fluctuate without an effect."""
_SHRINK = 0.2
"""Fraction of the model data on the device that is at least given up after an out-of-memory step."""
_CALM_STEPS = 100
"""Steps without a shortage before model data may grow again after the first one. Each further shortage doubles them."""


def budget_to_follow(plan: Plan, now: Budget, is_first: bool = False) -> Budget | None:
    """The budget of the plan to come, where what is there `now` asks for another plan. None: the plan may stay.

    It is never less than the chunks need: where there is not even so much, training goes on for as long as it can.
    is_first: no step has been read before.
    """
    margin = 0.0 if is_first else _MARGIN
    before, room = plan.budget.device, now.device
    # Twice the margin: a budget that has just shrunk is one margin below the room, and the same reading must not let it
    # grow back.
    if before is not None and _wants_more(plan, before) and (room is None or room > before * (1 + 2 * margin)):
        return now
    # Shrink, but only if the room is less than the plan takes: an unused part of the budget may disappear unnoticed.
    if room is None or room >= plan.device_bytes:
        return None
    # Give up a margin more than the reading asks for. Otherwise the next reading, a little lower, would move states
    # again.
    return _less(plan, now, int(room * (1 - margin)))


def budget_for_bound(plan: Plan, now: Budget) -> Budget | None:
    """Return the next plan's budget if an upper bound of the activations leaves less than the plan takes, else None.

    now: the room that is left beside the bound. A bound may be far above the real peak, so it never lets the budget
    grow, and it never refuses: if the chunks need more than is left, the step may fit nevertheless.
    """
    return None if now.device is None else _less(plan, now, now.device)


def budget_after_shortage(plan: Plan, now: Budget) -> Budget | None:
    """Return the reduced budget after an out-of-memory step, or None if the plan is already at its minimum.

    now: the budget that free memory allows, as far as it is known. The failed step wanted more than was measured, so
    the budget shrinks by `_SHRINK` even where `now` would allow more.
    """
    # A part of what the plan takes, not of its budget: a cut of an unused part would free nothing.
    less = int(plan.device_bytes * (1 - _SHRINK))
    if now.device is not None:
        less = min(less, int(now.device * (1 - _MARGIN)))
    return _less(plan, now, less)


def _less(plan: Plan, now: Budget, num_bytes: int) -> Budget | None:
    """A device budget of `num_bytes`, or the chunks' minimum if that is more. None if the plan takes no more anyway."""
    # A user's policy may not say its minimum. Then the policy is asked with this budget, and if it refuses, the plan in
    # force stays.
    less = max(num_bytes, plan.packed_minimum_bytes or 0)
    return replace(now, device=less) if less < plan.device_bytes else None


class ShortageCap:
    """The upper bound of model data after the device ran out of memory. It counts steps, which all ranks share.

    Without the cap the model would grow back at the next reading and run out of memory in the same way.
    """

    def __init__(self) -> None:
        self._most: int | None = None
        self._calm = 0
        self._needed = _CALM_STEPS // 2  # `set` doubles it

    def set(self, most: int | None) -> None:
        """A shortage has reduced model data to `most` bytes."""
        self._most, self._calm, self._needed = most, 0, 2 * self._needed

    def step(self) -> None:
        """A step ended without a shortage."""
        self._calm += 1
        if self._calm >= self._needed:
            self._most = None

    def bound(self, budget: Budget) -> Budget:
        """`budget`, limited to the cap."""
        if self._most is None:
            return budget
        return replace(budget, device=self._most if budget.device is None else min(budget.device, self._most))


def followed_in_words(
    before: Plan,
    after: Plan,
    activations: int | None,
    is_short: bool,
    peak: str | None = None,
    room: int | None = None,
) -> str:
    """Say in one line the room on the device now and the number of states that have moved.

    activations: bytes that a step was seen to take besides model data. is_short: the device ran out of memory. peak:
    the event of a step with the most activations on rank 0, which tells the line. None: no step was recorded. room:
    bytes that the device has for model data, where that may be less than the chunks need. None: as `after` says.
    """
    budgets = [_in_words(plan.budget.device) for plan in (before, after)]
    # The budget is never less than the chunks need, so it may exceed the room that there is. Then the line says both.
    if room is not None and room < (after.budget.device or 0):
        budgets[1] = f"{format_bytes(room)} of model data, where the chunks need {budgets[1]}"
    else:
        budgets[1] += " of model data"
    taken = "" if activations is None else f" beside {format_bytes(activations)} of activations"
    taken += peak_in_words(before, peak) if taken else ""
    why = "the device ran out of memory in the last step, which was dropped: it" if is_short else "the device"
    return f"{why} has room for {budgets[1]}{taken}, after {budgets[0]}: {_moved_in_words(before, after)}"


def bounded_in_words(before: Plan, after: Plan, most_activations: int) -> str:
    """Say in one line for which bound of activations model data made room, and how many states have moved."""
    budgets = [_in_words(plan.budget.device) for plan in (before, after)]
    return (
        f"this batch takes up to {format_bytes(most_activations)} of activations, by an estimate from the sizes of the "
        f"weights, which leaves {budgets[1]} to model data, after {budgets[0]}, until a step has shown what it takes: "
        f"{_moved_in_words(before, after)}"
    )


def micro_batches_in_words(before: Plan, after: Plan) -> str:
    """Say in one line how many micro-batches steps turned out to have, and how many states have moved."""
    was, now = (plan.demand.micro_batches for plan in (before, after))
    return f"steps have {now} micro-batches, and the plan was for {was}: {_moved_in_words(before, after)}"


def has_room_for(plan: Plan, optim_states: Sequence[float]) -> bool:
    """Whether the plan counts these numbers of states per element, for the chunks that have a home for any."""
    pairs = zip(plan.demand.chunks, optim_states, strict=True)
    return all(chunk.optim_states == number for chunk, number in pairs if Kind.OPTIM in chunk.home_bytes)


def states_in_words(optim_states: Sequence[float]) -> str:
    """How many states per element an optimizer keeps, in runs of chunks that have equally many."""
    runs = [f"{number:g} of {len(list(its))} chunks" for number, its in groupby(optim_states)]
    return f"states per element: {', '.join(runs)}"


def optimizer_in_words(before: Plan, after: Plan) -> str:
    """Say in one line that the optimizer has states that the plan did not count, and how many states have moved."""
    return f"the optimizer keeps other states than the plan was for: {_moved_in_words(before, after)}"


def _moved_in_words(before: Plan, after: Plan) -> str:
    pairs = zip(before.placement.homes, after.placement.homes, strict=True)
    # A kind that only one of the plans has was allocated or given back, as after unfreezing, and not moved.
    moves = [homes[kind] for had, homes in pairs for kind in had if kind in homes and had[kind] is not homes[kind]]
    slots = [sum(plan.placement.num_slots) for plan in (before, after)]
    return (
        f"{moves.count(Tier.HOST)} states moved to the host, {moves.count(Tier.DEVICE)} onto the device, slots "
        f"{slots[0]} -> {slots[1]}"
    )


def peak_in_words(plan: Plan, peak: str | None) -> str:
    """The event with the most activations on rank 0, for a line that rank 0 prints. Empty if it is unknown."""
    return "" if peak is None else f" (the most at {peak}{' on rank 0' if plan.world_size > 1 else ''})"


def _in_words(num_bytes: int | None) -> str:
    return "any amount" if num_bytes is None else format_bytes(num_bytes)


def _wants_more(plan: Plan, budget_bytes: int) -> bool:
    """Whether the plan could use more memory: states rest on the host, or the budget is nearly used up by slots."""
    return plan.host_bytes > 0 or plan.device_bytes > budget_bytes * (1 - 2 * _MARGIN)


# -- The plan of a model whose states leave the device between steps, so that another model can use the device.
#
# It is an ordinary plan with the same chunks and homes on the host, so parameters can be read and the model can even
# train with it. `replan` returns to the policy's placement.


def offloaded(before: Plan, kinds: Collection[Kind]) -> Plan:
    """`before` with these states of all chunks on the host, in addition to those that it has offloaded already.

    Gradients get no homes on the host, because between steps they hold nothing. A gradient that arrives nevertheless
    takes memory at that moment.
    """
    offloaded_kinds = before.offloaded | frozenset(kinds)
    demand, placement = before.demand, before.placement
    homes = tuple(
        {kind: Tier.HOST if kind in offloaded_kinds else tier for kind, tier in chunk_homes.items()}
        for chunk_homes in placement.homes
    )
    demand = replace(demand, chunks=tuple(_without_gradients(chunk, offloaded_kinds) for chunk in demand.chunks))
    # Persistent parameters leave the device too. The least slots were computed without them, and they need slots now.
    if Kind.PARAM in offloaded_kinds:
        least = min_slots(before.packing.chunks, before.spec.operators, before.use_order)
        demand = replace(demand, min_slots=least, max_live_numel=None)
    # A kept slot contains the parameter home on the device, so it goes when the parameters go.
    moved = slots_for(demand, homes, () if Kind.PARAM in offloaded_kinds else placement.kept)
    if Kind.PARAM not in offloaded_kinds:
        # `slots_for` gives the fewest slots, but parameters that stay keep all that the plan has.
        moved = replace(moved, num_slots=placement.num_slots)
    # Ranks compare plans by this hash, so offloading on some ranks only is noticed.
    hash_ = hash_of(before.packing, moved, before.settings, before.trained, demand.scratch_bytes)
    return replace(before, demand=demand, placement=moved, hash=hash_, is_first=False, offloaded=offloaded_kinds)


def _without_gradients(chunk: ChunkDemand, left: Collection[Kind]) -> ChunkDemand:
    if Kind.GRAD not in left or Kind.GRAD not in chunk.home_bytes:
        return chunk
    return replace(chunk, home_bytes={**chunk.home_bytes, Kind.GRAD: 0})
