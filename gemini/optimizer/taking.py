"""Makes an optimizer on all ranks or on none: failures are told to all, and memory is allocated, all of it or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemini.errors import BudgetError
from gemini.manager.chunk_manager import ChunkManager
from gemini.manager.step import Step
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.chunk_states import ChunkStates
from gemini.placement.demand import Tier
from gemini.placement.following import has_room_for
from gemini.placement.refusals import check_host_room_for_steps


@contextmanager
def making_optimizer(step: Step) -> Iterator[None]:
    """Around all that makes an optimizer, its checks too: an exception is told to the other ranks.

    The rank that was refused may go on, while the others would wait for it in the next collective. After a failure that
    every rank caught they start together again; collective in that case.
    """
    step.failures.find()
    # An optimizer may be made inside a forward, which goes on.
    if not (step.calls.by_thread or step.is_recomputing()):
        step.failures.recover()
    with step.publishing():
        yield


def take_states(model: ShardedModel, states: ChunkStates) -> None:
    """Allocate gradients, masters and optimizer state. Collective.

    The plan in force counts Adam's two states per element. Another one is made for an optimizer with fewer or more.
    If the device has less memory than the budget, model data shrinks as after an out-of-memory step, and all of it is
    tried again. It is tried again once if the host has more free memory now than when it was read. Raises BudgetError,
    alike on all ranks, and holds nothing then.
    """
    purpose = model.trainability.purpose
    # Free memory of the host may grow again and again by chance. Look once, or this might never end.
    has_looked = False
    numbers = states.state_counts(model.chunk_manager.chunks)
    with purpose.beginning_training("an optimizer", numbers):
        while True:
            error = _try_states(model.chunk_manager, states, purpose.may_make_room())
            if error is None:
                # The plan may count other numbers where states cannot move now. Then a later forward follows.
                if has_room_for(model.plan, numbers):
                    states.note_followed()
                return
            # Every rank takes the same branch, because all have agreed on `error.is_shortage`: both calls are
            # collective.
            if error.is_shortage:
                found = purpose.make_room()
            else:
                found, has_looked = not has_looked and purpose.find_host_room(), True
            if not found:
                raise error


def _try_states(manager: ChunkManager, states: ChunkStates, stays_on_device: bool) -> BudgetError | None:
    """Allocate everything where the plan puts it. Collective. Returns None, or the reason why no rank holds any of it.

    stays_on_device: state that finds no memory on the device is a failure, and does not rest on the host instead.
    """
    training, error = manager.training, None
    device, host = manager.memory.tiers
    was_there, num_shortages = training.is_there, device.num_shortages
    trained = [chunk for chunk in manager.chunks if chunk.trainable]
    plan = manager.plan
    homes = {chunk: plan.placement.optim_home(plan.demand, chunk.index) for chunk in trained}
    try:
        try:
            # Gradients and masters come first, and map the host memory of the optimizer state in one piece with theirs.
            training.allocate(states.missing_host_bytes(homes))
            states.add_all(homes)
            check_host_room_for_steps(plan, host.ledger.total_bytes)
            if stays_on_device and device.num_shortages > num_shortages:
                error = BudgetError("device: no memory for optimizer state", tier=Tier.DEVICE, is_shortage=True)
        except BudgetError as refusal:
            error = refusal
        # A rank that found room must give it back if another one found none: no rank trains alone.
        error = manager.agree_on_room(error)
    except BaseException:
        _give_back(manager, states, was_there)
        raise
    if error is not None:
        _give_back(manager, states, was_there)
    elif not was_there:
        # The plan's gradient slots have no memory yet: their next use allocates it.
        manager.step.payloads.miss_room()
    return error


def _give_back(manager: ChunkManager, states: ChunkStates, training_was_there: bool) -> None:
    states.drop_all()
    # If a backward came before the optimizer, it took the gradients' memory, and they are in it.
    if not training_was_there:
        manager.training.give_back()
