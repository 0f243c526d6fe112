"""The first plan of a model, for training if that fits, else for inference; and the one of its optimizer."""

from __future__ import annotations

from dataclasses import replace

from gemini.errors import BudgetError
from gemini.placement.budget import FreeBytes
from gemini.placement.demand import OPTIM_STATES, WRAPPED_KINDS, Tier
from gemini.placement.packed import Packed, trained_at_first
from gemini.placement.plan import Plan, least_of_all_packings, replan
from gemini.placement.refusals import has_host_room, has_host_room_for_steps
from gemini.placement.search import find_plans, infer_with, plan_inference, plan_packed, train_with
from gemini.settings import Settings


def plan_first(packed: Packed, settings: Settings, free: FreeBytes) -> tuple[Plan, BudgetError | None]:
    """The plan that a model is wrapped with: for training, or for inference together with the refusal of training.

    settings: those of `packed`; budgets and policy may be others.
    Raises BudgetError where neither fits: of the two refusals the one that asks for less, which is enough to wrap.
    """
    first, refused = _plan_for_adam(packed, settings, free)
    if settings.chunk_size is None and not (refused is None and has_host_room_for_steps(first)):
        first = _with_room_for_fewer(first, refused is not None, packed, free)
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
            if error.tier == refused.tier == "host" and error.needed_bytes is not None:
                raise error.reworded(f"{error}. That is enough for inference; to train it, {refused}") from None
    raise refused


def _with_room_for_fewer(first: Plan, infers: bool, packed: Packed, free: FreeBytes) -> Plan:
    """`first`, which has no room for Adam, or a plan with chunks that have room for an optimizer with fewer states.

    infers: the device refuses to train with Adam, so that the model is wrapped with a plan for inference. See [Note:
    Optimizers to come] in search.py.
    """
    for optim_states in reversed(range(OPTIM_STATES)):
        if train_with(first, optim_states) is not None:
            return first
        lighter = find_plans(packed, first.settings, free, optim_states).trains
        if lighter is not None:
            return _wrap_with(lighter, first, infers, free)
    return first


def _wrap_with(lighter: Plan, first: Plan, infers: bool, free: FreeBytes) -> Plan:
    """`first` with the chunks of `lighter`; `first` itself if a model cannot be wrapped with these."""
    spec, settings, world_size = first.spec, first.settings, first.world_size
    try:
        if infers:
            return infer_with(lighter.packing, spec, settings, world_size, free)
        states = [OPTIM_STATES] * len(lighter.packing.chunks)
        plan = replan(lighter, lighter.trained, {}, optim_states=states)
    except BudgetError:
        return first
    return replace(plan, is_first=True) if has_host_room(plan, WRAPPED_KINDS) else first


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
