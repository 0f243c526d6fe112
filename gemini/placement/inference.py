"""The first plan of a model, for training if that fits, else for inference; and the one of its optimizer."""

from __future__ import annotations

from gemini.errors import BudgetError
from gemini.placement.budget import FreeBytes
from gemini.placement.demand import OPTIM_STATES
from gemini.placement.packed import Packed
from gemini.placement.plan import Plan, plan_inference, plan_packed, replan
from gemini.settings import Settings


def plan_first(packed: Packed, settings: Settings, free: FreeBytes) -> tuple[Plan, BudgetError | None]:
    """The plan that a model is wrapped with: for training, or for inference together with the refusal of training.

    settings: those of `packed`; budgets and policy may be others.
    Raises BudgetError where neither fits: of the two refusals the one that asks for less, which is enough to wrap.
    """
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
    return replan(first, first.trained, {}, infers=False, optim_states=states, is_by_default=is_by_default)


def are_alike(before: Plan, after: Plan) -> bool:
    """Whether all states of `after`, for inference, rest where they do in `before`, with the same parameter slots."""
    one, other = before.placement, after.placement
    pairs = zip(one.homes, other.homes, strict=True)
    stays = all(its[kind] is homes.get(kind) for homes, its in pairs for kind in its)
    return stays and (one.num_slots, one.kept) == (other.num_slots, other.kept)
