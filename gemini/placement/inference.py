"""The first plan of a model, for training if that fits, else for inference; and the one of its optimizer."""

from __future__ import annotations

from gemini.errors import BudgetError
from gemini.placement.budget import FreeBytes
from gemini.placement.demand import OPTIM_STATES
from gemini.placement.plan import Plan, plan_inference, plan_model, replan
from gemini.placement.specs import ModelSpec
from gemini.settings import Settings


def plan_first(
    spec: ModelSpec, settings: Settings, world_size: int, free: FreeBytes
) -> tuple[Plan, BudgetError | None]:
    """The plan that a model is wrapped with: for training, or for inference together with the refusal of training.

    Raises BudgetError where neither fits: of the two refusals the one that asks for less, which is enough to wrap.
    """
    try:
        return plan_model(spec, settings, world_size, free), None
    except BudgetError as error:
        refused = error
    # A model without trainable weights was planned as if for inference already: the same refusal would come again.
    if any(weight.trainable for weight in spec.weights):
        try:
            return plan_inference(spec, settings, world_size, free), refused
        except BudgetError as error:
            if error.tier == refused.tier == "host" and error.needed_bytes is not None:
                raise error.reworded(f"{error}. That is enough for inference; to train it, {refused}") from None
    raise refused


def plan_training(spec: ModelSpec, settings: Settings, world_size: int, optim_states: int = OPTIM_STATES) -> Plan:
    """The plan of a model whose optimizer keeps `optim_states` states per element of each chunk. Local.

    The first plan counts Adam's and chooses the chunk size, which stays, so the plan is made in the same two steps as
    by `ShardedModel` and `ShardedOptimizer`. Raises BudgetError if training does not fit.
    """
    if optim_states == OPTIM_STATES:
        return plan_model(spec, settings, world_size)
    first, _ = plan_first(spec, settings, world_size, FreeBytes())
    return replan(first, first.trained, {}, infers=False, optim_states=[optim_states] * len(first.packing.chunks))


def are_alike(before: Plan, after: Plan) -> bool:
    """Whether all states of `after`, for inference, rest where they do in `before`, with the same parameter slots."""
    one, other = before.placement, after.placement
    pairs = zip(one.homes, other.homes, strict=True)
    stays = all(its[kind] is homes.get(kind) for homes, its in pairs for kind in its)
    return stays and (one.num_slots, one.kept) == (other.num_slots, other.kept)
