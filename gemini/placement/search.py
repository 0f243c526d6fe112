"""The search for a plan within budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gemini.errors import BudgetError
from gemini.placement.budget import (
    LESS_FOR_ACTIVATIONS,
    Budget,
    FreeBytes,
    advised,
    later_device_bytes,
    least_of,
    with_less_for_activations,
)
from gemini.placement.demand import OPTIM_STATES, WRAPPED_KINDS, Kind, ModelSpec, Tier
from gemini.placement.host_room import (
    check_host_room,
    check_host_room_for_steps,
    has_host_room,
    has_host_room_for_steps,
    refuses_unannounced,
)
from gemini.placement.needs import Packed, trained_at_first
from gemini.placement.optimizers import OptimizerKind, states_by_chunk
from gemini.placement.packing import CHUNKS_PLACED, Packing, packings, step_cost
from gemini.placement.plan import Plan, kept_at_first, least_of_all_packings
from gemini.placement.planning import plan_demand, plan_packing, replan, with_room_for_steps
from gemini.placement.policies import is_short, leaves_much, would_leave_much
from gemini.settings import Settings

# -- The choice among plans that differ in their chunk size, made for the same budgets. Pure functions.


_MOST_JUDGED = 24
"""Check at most this many plans against later budgets. Each check costs several placements."""


def best_of(plans: Sequence[Plan], later: Sequence[int]) -> Plan:
    """The plan with the cheapest step. Local.

    Plans that leave much of a short budget unused rank last. Of the cheapest plans the first one is taken that does so
    under the fewest budgets in `later`, because the chunk size is fixed when the model is wrapped.

    plans: at least one, each with room to train. later: device budgets in bytes that may apply after the first step.
    """
    if len(plans) == 1:
        return plans[0]
    # The sort is stable, so among equal costs the size that the search ranked first stays first on every rank.
    cheapest = sorted(plans, key=_cost)[:_MOST_JUDGED]
    left = []
    for plan in cheapest:
        left.append(_num_left(plan, later))
        # No plan leaves fewer than none, and the plans behind this one cost at least as much.
        if not left[-1]:
            break
    return cheapest[left.index(min(left))]


def plan_is_short(plan: Plan) -> bool:
    """Whether a larger device budget would change the plan's placement."""
    return is_short(plan.demand, plan.placement, plan.settings.policy, plan.budget.device)


def _cost(plan: Plan) -> tuple[bool, int]:
    demand, placement, budget = plan.demand, plan.placement, plan.budget.device
    # False sorts before True, so plans that use the budget come first, whatever their cost.
    leaves = budget is not None and leaves_much(demand, placement, plan.settings.policy, budget)
    return leaves, step_cost(demand, placement, plan.world_size)


def _num_left(plan: Plan, later: Sequence[int]) -> int:
    """The number of `later` budgets of which this plan's chunks would leave much unused."""
    if not plan_is_short(plan):
        return 0
    return sum(would_leave_much(plan.demand, plan.settings.policy, each) for each in later)


# -- The search for the chunk size: the first plan of a model, over all packings that its settings allow.
#
# If the user names no chunk size, the candidate sizes are placed in the order of `packing.py`, and the size with the
# cheapest step is chosen (below). A model is refused only if no size fits.
#
# [Note: Optimizers to come] Chunks keep their size, and the optimizer comes after them. A first plan counts Adam's two
# states per element. Under a short budget the best size for Adam may be too large for Adam with amsgrad, which keeps
# three, although a smaller one would do: then a size is taken that has room for both, if there is one. Where no size
# has room for Adam, the size is taken with which momentum fits, else plain SGD (below). A size with room for
# some number of states has room for fewer, so that no optimizer is refused for which a chunk size could be found. With
# more than three states it may be.


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
    settings = settings.over(world_size)
    return plan_packed(Packed(spec, settings, world_size), settings, free)


def plan_packed(packed: Packed, settings: Settings, free: FreeBytes | None = None, is_try: bool = False) -> Plan:
    """`plan_model` of packings that other plans of the same model and ranks have made, or will use again. Local.

    settings: those of `packed`; budgets and policy may be others. is_try: whether there is a plan is what counts, and
    chunks need not have room for other optimizers than Adam. Raises as `plan_model` does.
    """
    free, wraps = free or FreeBytes(), None
    # How much activations need is not known yet. What might fit once it is known is not refused before.
    for freer in (free, *with_less_for_activations(settings, free)):
        found = find_plans(packed, settings, freer)
        if found.trains is not None:
            trains = found.trains if is_try else _with_room_for_more(found.trains, packed, freer)
            return replace(trains, activation_fraction=freer.fraction)
        wraps = wraps or found.wraps
    # Without room to train the model may be meant for inference. An optimizer or a backward raises the refusal.
    if wraps is not None:
        return wraps
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


def train_with(plan: Plan, optim_states: float) -> Plan | None:
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
    other = with_room_for_steps(other, known_are_enough=not refuses_unannounced(other))
    return other if has_host_room_for_steps(other, refuses_unannounced(other)) else None


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
    packed: Packed, settings: Settings, free: FreeBytes | None = None, optim_states: float = OPTIM_STATES
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
            if plan_is_short(plan):
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
        roomy = with_room_for_steps(best, known_are_enough=not refuses_unannounced(best))
        if has_host_room_for_steps(roomy, refuses_unannounced(roomy)):
            found.trains = roomy
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
    is_unknown = free is None or free.are_activations_unknown
    return advised(error, spec, settings, LESS_FOR_ACTIVATIONS[-1] if is_unknown else None)


def _with_room_for_more(plan: Plan, packed: Packed, free: FreeBytes | None) -> Plan:
    """`plan`, or one with other chunks that have room for `MOST_STATES` too. See [Note: Optimizers to come]."""
    if plan.settings.chunk_size is not None or train_with(plan, MOST_STATES) is not None:
        return plan
    # The plan itself counts Adam's two states, so the roomier chunks are planned once more with these.
    roomier = find_plans(packed, plan.settings, free, MOST_STATES).trains
    return plan if roomier is None else train_with(roomier, OPTIM_STATES) or plan


# -- The first plan of a model, for training if that fits, else for inference; and the one of its optimizer.


def plan_first(packed: Packed, settings: Settings, free: FreeBytes) -> tuple[Plan, BudgetError | None]:
    """The plan that a model is wrapped with: for training, or for inference together with the refusal of training.

    settings: those of `packed`; budgets and policy may be others.
    Raises BudgetError where neither fits: of the two refusals the one that asks for less, which is enough to wrap.
    """
    first, refused = _plan_for_adam(packed, settings, free)
    has_room = has_host_room_for_steps(first, refuses_unannounced(first))
    if settings.chunk_size is not None or (refused is None and has_room):
        return first, refused
    # There is no room for Adam: see [Note: Optimizers to come].
    # Momentum's one state first, then none. Where the chunks of `first` have room for the number they stay: other
    # chunks would serve no more optimizers.
    for optim_states in reversed(range(OPTIM_STATES)):
        if train_with(first, optim_states) is not None:
            break
        lighter = find_plans(packed, settings, free, optim_states).trains
        if lighter is not None:
            return _wrap_with(lighter, first, refused, free)
    return first, refused


def _plan_for_adam(packed: Packed, settings: Settings, free: FreeBytes) -> tuple[Plan, BudgetError | None]:
    try:
        return plan_packed(packed, settings, free), None
    except BudgetError as error:
        refused = error
    # A model without trainable weights was planned as if for inference already: the same refusal would come again.
    if any(weight.trainable for weight in packed.spec.weights):
        try:
            return plan_inference(packed.spec, settings, packed.world_size, free), refused
        except BudgetError as error:
            # The refusal of inference asks for less, which is enough to wrap the model. The words name both needs.
            if error.tier == refused.tier == "host" and error.needed_bytes is not None:
                raise error.reworded(f"{error}. That is enough for inference; to train it, {refused}") from None
    raise refused


def _wrap_with(
    lighter: Plan, first: Plan, refused: BudgetError | None, free: FreeBytes
) -> tuple[Plan, BudgetError | None]:
    """`first` and `refused` with the chunks of `lighter`; as they are if a model cannot be wrapped with these.

    refused: None if Adam has room on the device with the chunks of `first`, and only the host lacks some.
    """
    spec, settings, packing = first.spec, first.settings, lighter.packing
    if refused is None:
        try:
            # No optimizer is there yet, so this plan counts Adam's states, as every first plan does.
            plan = replan(lighter, lighter.trained, {}, optim_states=[OPTIM_STATES] * len(packing.chunks))
            check_host_room(plan, WRAPPED_KINDS)
            # `replan` is made for chunks that exist. None of these do, so the minimum is still that of all chunk sizes.
            return replace(plan, is_first=True), None
        except BudgetError:
            pass
    try:
        plan = infer_with(packing, spec, settings, first.world_size, free)
    except BudgetError:
        return first, refused
    return plan, refused or _host_refusal(first)


def _host_refusal(plan: Plan) -> BudgetError | None:
    try:
        check_host_room(plan, tuple(Kind))
        check_host_room_for_steps(plan)
    except BudgetError as error:
        return error
    return None


def plan_training(
    packed: Packed,
    settings: Settings,
    free: FreeBytes,
    optim_states: float | OptimizerKind = OPTIM_STATES,
    is_try: bool = False,
) -> Plan:
    """The plan of a model whose optimizer keeps `optim_states` states per element of each chunk. Local.

    The first plan counts Adam's and chooses the chunk size, which stays, so the plan is made in the same two steps as
    by `ShardedModel` and `ShardedOptimizer`. settings: as for `plan_first`. is_try: as for `plan_packed`.

    Raises BudgetError if the device has no room to train, or the host none for the weights.
    """
    if optim_states == OPTIM_STATES:
        return plan_packed(packed, settings, free, is_try)
    first, _ = plan_first(packed, settings, free)
    states = states_by_chunk(optim_states, first.packing, packed.spec)
    # `replan` by itself would take any first plan for one whose activations are unknown.
    is_by_default = free.are_activations_unknown
    try:
        plan = replan(first, first.trained, {}, infers=False, optim_states=states, is_by_default=is_by_default)
    except BudgetError as error:
        raise with_least(error, first, max(states, default=0)) from None
    return replace(plan, is_first=True)


def with_least(error: BudgetError, plan: Plan, optim_states: float) -> BudgetError:
    """The refusal to train with the chunks of `plan`, with the least that any other chunk size needs, if that is less.

    optim_states: the most states per element that the optimizer keeps. Local.
    """
    spec, settings = plan.spec, plan.settings
    # What chunks of another size need is known of what was trained at first.
    is_known = list(plan.trained) == trained_at_first(spec, plan.packing) and error.needed_bytes is not None
    # `least_of_all_packings` knows bytes of the device only, and a size that the user gave has no others beside it.
    if error.tier != Tier.DEVICE or settings.chunk_size is not None or not is_known:
        return error
    least = least_of_all_packings(spec, settings, plan.world_size, False, optim_states)
    if least is None or least >= (error.needed_bytes or 0):
        return error
    words = f"{error}. With smaller chunks {least} bytes are enough: wrap the model with a budget of at least so many"
    return error.reworded(words, needed_bytes=least)


def are_alike(before: Plan, after: Plan) -> bool:
    """Whether all states of `after`, for inference, rest where they do in `before`, with the same parameter slots."""
    one, other = before.placement, after.placement
    pairs = zip(one.homes, other.homes, strict=True)
    stays = all(its[kind] is homes.get(kind) for homes, its in pairs for kind in its)
    return stays and (one.num_slots, one.kept) == (other.num_slots, other.kept)
