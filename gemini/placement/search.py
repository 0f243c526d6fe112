"""The search for the chunk size: the first plan of a model, over all packings that its settings allow.

If the user names no chunk size, the candidate sizes are placed in the order of `chunk_size.py`, and the size with the
cheapest step is chosen (`choosing.py`). A model is refused only if no size fits.

[Note: Optimizers to come] Chunks keep their size, and the optimizer comes after them. A first plan counts Adam's two
states per element. Under a short budget the best size for Adam may be too large for Adam with amsgrad, which keeps
three, although a smaller one would do: then a size is taken that has room for both, if there is one. Where no size has
room for Adam, the size is taken with which momentum fits, else plain SGD (`inference.py`). A size with room for some
number of states has room for fewer, so that no optimizer is refused for which a chunk size could be found. With more
than three states it may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gemini.errors import BudgetError
from gemini.placement.budget import Budget, FreeBytes, later_device_bytes
from gemini.placement.choosing import best_of, is_short
from gemini.placement.chunk_facts import Packing, packings
from gemini.placement.chunk_size import CHUNKS_PLACED
from gemini.placement.demand import OPTIM_STATES, WRAPPED_KINDS, Kind
from gemini.placement.packed import Packed, trained_at_first
from gemini.placement.plan import Plan, kept_at_first, plan_demand, plan_packing
from gemini.placement.refusals import advised, check_host_room, has_host_room, has_host_room_for_steps, least_of
from gemini.placement.specs import ModelSpec
from gemini.settings import Settings

MOST_STATES = 3
"""The most states per element that the choice of a chunk size leaves room for: those of Adam with amsgrad."""


def plan_model(spec: ModelSpec, settings: Settings, world_size: int, free: FreeBytes | None = None) -> Plan:
    """The plan of each of `world_size` ranks. A pure function: local, and equal for equal arguments.

    Args:
        spec: the module's description, from `specs_of`.
        settings: the settings that `spec` was made with.
        world_size: the number of ranks.
        free: free bytes of the tiers for which `settings` name no budget. None: no bound there.

    Raises BudgetError with the needed bytes, which are the least over all chunk sizes if those are searched. Raises
    ValueError if the shard strategy loses or repeats a parameter.

    Example:
        >>> settings = Settings(stage=2)
        >>> spec = specs_of(torch.nn.Linear(64, 64), settings, world_size=4)
        >>> plan_model(spec, settings, world_size=4).minimum_bytes
        62208
    """
    return plan_packed(Packed(spec, settings, world_size), settings, free)


def plan_packed(packed: Packed, settings: Settings, free: FreeBytes | None = None) -> Plan:
    """`plan_model` of packings that other plans of the same model and ranks have made, or will use again. Local.

    settings: those of `packed`; budgets and policy may be others. Raises as `plan_model` does.
    """
    found = find_plans(packed, settings, free)
    if found.trains is not None:
        return _with_room_for_more(found.trains, packed, free)
    # Without room to train the model may be meant for inference. An optimizer or a backward raises the refusal.
    if found.wraps is not None:
        return found.wraps
    raise refusal_of(found.refused, packed.spec, settings, free) from None


def plan_inference(spec: ModelSpec, settings: Settings, world_size: int, free: FreeBytes | None = None) -> Plan:
    """Like `plan_model`, for a model that only infers. Raises BudgetError if even that does not fit."""
    refused: list[BudgetError] = []
    for packing in packings(spec, settings, world_size):
        try:
            # The sizes come cheapest first, so the first one that fits is taken.
            return infer_with(packing, spec, settings, world_size, free)
        except BudgetError as error:
            refused.append(error)
    raise refusal_of(refused, spec, settings, free) from None


def infer_with(
    packing: Packing, spec: ModelSpec, settings: Settings, world_size: int, free: FreeBytes | None = None
) -> Plan:
    """The first plan of a model that only infers, with these chunks. Raises BudgetError if it does not fit."""
    budget = Budget.of(settings, free or FreeBytes())
    trained, kept = trained_at_first(spec, packing), kept_at_first(spec, packing)
    plan = plan_packing(spec, settings, world_size, budget, packing, trained, kept, infers=True)
    # Wrapping takes these states at once, so without room for them there is no model.
    check_host_room(plan, WRAPPED_KINDS)
    return plan


def train_with(plan: Plan, optim_states: int) -> Plan | None:
    """The first plan with the chunks of `plan`, for an optimizer that keeps so many states. None: it does not fit."""
    spec, settings, states = plan.spec, plan.settings, [optim_states] * len(plan.packing.chunks)
    trained = trained_at_first(spec, plan.packing)
    try:
        other = plan_packing(
            spec, settings, plan.world_size, plan.budget, plan.packing, trained, {}, optim_states=states
        )
    except BudgetError:
        return None
    # Room for what rests there is not enough: gradients pass through the host in a step.
    return other if has_host_room_for_steps(other) else None


@dataclass
class Found:
    """What a search over all packings has found for one number of states per element."""

    trains: Plan | None = None
    """The cheapest plan with room for whole training steps."""
    wraps: Plan | None = None
    """A plan that fits the device, while the host has room for some states only: an optimizer may keep fewer."""
    refused: list[BudgetError] = field(default_factory=list)
    """A refusal by each packing that was tried and does not fit."""


def find_plans(
    packed: Packed, settings: Settings, free: FreeBytes | None = None, optim_states: int = OPTIM_STATES
) -> Found:
    """Plans for training with an optimizer that keeps `optim_states` states per element. Local.

    settings: those of `packed`; budgets and policy may be others.
    """
    spec, world_size, found = packed.spec, packed.world_size, Found()
    budget = Budget.of(settings, free or FreeBytes())
    infers = trains = None
    placed: list[Plan] = []
    num_placed = 0
    for packing, demand in packed.with_states(optim_states):
        # Only once some size fits: a refusal says that no size needs less.
        if placed and num_placed >= CHUNKS_PLACED:
            break
        num_placed += len(packing.chunks)
        try:
            trained, needs = trained_at_first(spec, packing), replace(demand, max_host_bytes=budget.host)
            plan = plan_demand(spec, settings, world_size, budget, packing, trained, needs)
            # With room for the weights alone a model can still be wrapped and infer, so only without it the size is
            # refused.
            check_host_room(plan, (Kind.PARAM,))
        except BudgetError as error:
            found.refused.append(error)
            continue
        if has_host_room(plan, tuple(Kind)):
            placed.append(plan)
            if is_short(plan):
                continue
            break  # sizes come in order of cost, so no later size with which everything fits is cheaper
        # The host lacks room for some of Adam's state. An optimizer that keeps less may fit, or none is made.
        if has_host_room(plan, WRAPPED_KINDS):
            trains = trains or plan
        infers = infers or plan
    while placed:
        best = best_of(placed, later_device_bytes(settings, free or FreeBytes()))
        # What passes through the host is known from a simulated step, which takes time. So the best size is checked,
        # and the next best only if that one has no room.
        if has_host_room_for_steps(best):
            found.trains = best
            return found
        placed = [plan for plan in placed if plan is not best]
        trains = trains or best
    # A size with room for all but optimizer state comes before one with room for the weights alone.
    found.wraps = trains or infers
    return found


def refusal_of(
    refused: list[BudgetError], spec: ModelSpec, settings: Settings, free: FreeBytes | None = None
) -> BudgetError:
    """The one to raise of the refusals by all packings, with what would help."""
    error = least_of(refused, is_searched=settings.chunk_size is None)
    return advised(error, spec, settings, is_by_default=free is None or free.are_activations_unknown)


def _with_room_for_more(plan: Plan, packed: Packed, free: FreeBytes | None) -> Plan:
    """`plan`, or one with other chunks that have room for `MOST_STATES` too. See [Note: Optimizers to come]."""
    if plan.settings.chunk_size is not None or train_with(plan, MOST_STATES) is not None:
        return plan
    # The plan itself counts Adam's two states, so the roomier chunks are planned once more with these.
    roomier = find_plans(packed, plan.settings, free, MOST_STATES).trains
    return plan if roomier is None else train_with(roomier, OPTIM_STATES) or plan
