"""The first plan of a model, for training if that fits, else for inference; and the one of its optimizer."""

from __future__ import annotations

from dataclasses import replace

from gemini.errors import BudgetError
from gemini.placement.budget import FreeBytes
from gemini.placement.demand import OPTIM_STATES, WRAPPED_KINDS, Kind, Tier
from gemini.placement.packed import Packed, trained_at_first
from gemini.placement.plan import Plan, least_of_all_packings, replan
from gemini.placement.refusals import check_host_room, check_host_room_for_steps, has_host_room_for_steps
from gemini.placement.search import find_plans, infer_with, plan_inference, plan_packed, train_with
from gemini.settings import Settings


def plan_first(packed: Packed, settings: Settings, free: FreeBytes) -> tuple[Plan, BudgetError | None]:
    """The plan that a model is wrapped with: for training, or for inference together with the refusal of training.

    settings: those of `packed`; budgets and policy may be others.
    Raises BudgetError where neither fits: of the two refusals the one that asks for less, which is enough to wrap.
    """
    first, refused = _plan_for_adam(packed, settings, free)
    if settings.chunk_size is not None or (refused is None and has_host_room_for_steps(first)):
        return first, refused
    # There is no room for Adam: see [Note: Optimizers to come] in search.py.
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


def plan_training(packed: Packed, settings: Settings, free: FreeBytes, optim_states: int = OPTIM_STATES) -> Plan:
    """The plan of a model whose optimizer keeps `optim_states` states per element of each chunk. Local.

    The first plan counts Adam's and chooses the chunk size, which stays, so the plan is made in the same two steps as
    by `ShardedModel` and `ShardedOptimizer`. settings: as for `plan_first`. Raises BudgetError if the device has no
    room to train, or the host none for the weights.
    """
    if optim_states == OPTIM_STATES:
        return plan_packed(packed, settings, free)
    first, _ = plan_first(packed, settings, free)
    states = [optim_states] * len(first.packing.chunks)
    # `replan` by itself would take any first plan for one whose activations are unknown.
    is_by_default = free.are_activations_unknown
    try:
        plan = replan(first, first.trained, {}, infers=False, optim_states=states, is_by_default=is_by_default)
    except BudgetError as error:
        raise with_least(error, first, optim_states) from None
    return replace(plan, is_first=True)


def with_least(error: BudgetError, plan: Plan, optim_states: int) -> BudgetError:
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
