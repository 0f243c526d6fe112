"""The device runs out of memory in a step: the step is dropped, model data makes room, and training goes on.

On an emulated device whose capacity counts activations, one batch is larger than the others.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gemini
from gemini import DivergenceError, EmulatedDevice, RemoteRankError, ShardedModel, ShardedOptimizer, state_hash
from gemini.placement.budget import Budget
from gemini.placement.planning import ShortageCap
from tests.features.test_recorder import Peaked
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.told import told
from tests.zoo.mlp import CHUNK_NUMEL, Mlp, adam, build, inputs, loss_of, placed, train_while, weights_of

TOTAL = 90_000
LARGE = 3  # the step with the large batch
FAILURES = torch.OutOfMemoryError, RemoteRankError


def batch(step: int, rank: int, copies: int) -> Tensor:
    return inputs(10 * step + rank).repeat(copies if step == LARGE else 1, 1)


class WithLoss(Mlp):
    """On several ranks a failure of the loss must be one of the model: what fails in a script is the script's."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - x.flip(-1)).square().mean()


class Training:
    """A loop that catches what a step without memory raises, and makes the step again or leaves it out."""

    def __init__(self, device: EmulatedDevice, rank: int, make: Any = WithLoss, **options: Any) -> None:
        self.model = ShardedModel(build(make), device=device, chunk_size=CHUNK_NUMEL, **options)
        self.optimizer = ShardedOptimizer(self.model, adam(self.model.parameters()))
        self.rank = rank
        self.losses: list[float] = []
        self.failures: list[BaseException] = []

    def backward(self, x: Tensor) -> None:
        loss = self.model(x)
        self.optimizer.backward(loss)
        self.losses.append(float(loss.detach()))

    def step(self, step: int, copies: int, again: bool, micro_batches: int = 1) -> None:
        for _ in range(5):
            kept = len(self.losses)
            try:
                for micro in range(micro_batches):
                    self.backward(batch(step, self.rank + 2 * micro, copies if micro == micro_batches - 1 else 1))
                self.optimizer.step()
            except FAILURES as error:
                self.failures.append(error)
                del self.losses[kept:]
                error.__traceback__ = None  # it holds the activations
                if not again:
                    break
                self.optimizer.zero_grad()
            else:
                break
        self.optimizer.zero_grad()

    def run(
        self,
        copies: int,
        again: bool,
        between: Callable[[int], None] | None = None,
        leaves_out: bool = False,
        **how: Any,
    ) -> None:
        for step in range(7):
            if not (leaves_out and step == LARGE):
                self.step(step, copies, again, **how)
            if between is not None:
                between(step)

    def found(self) -> tuple[list[float], int]:
        """Losses and the hash of all state; closes the model."""
        found = self.losses, state_hash(self.model, self.optimizer)
        self.model.close()
        return found


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_batch_that_is_too_large_is_trained_again_on_a_smaller_budget(
    rank: int, world_size: int, micro_batches: int
) -> None:
    """The last rank alone runs out of memory; the others are told, and all make room."""
    device, plans = EmulatedDevice(TOTAL), []
    copies = 7 if rank == world_size - 1 else 1
    training = Training(device, rank)
    with told() as lines, device.holding_activations():
        training.run(copies, True, lambda step: plans.append(training.model.plan), micro_batches=micro_batches)
    errors = gathered(training.failures)
    assert errors[-1], "there was no shortage"
    assert {type(each) for each in errors[-1]} == {torch.OutOfMemoryError}
    assert {type(each) for its in errors[:-1] for each in its} <= {RemoteRankError}
    unbounded = Training(EmulatedDevice(), rank)
    unbounded.run(copies, True, micro_batches=micro_batches)
    assert training.found() == unbounded.found()
    before, after = plans[LARGE - 1], plans[LARGE]
    assert after.device_bytes <= 0.8 * before.device_bytes
    assert plans[-1].device_bytes <= after.device_bytes, "it does not grow back at once"
    assert len(set(gathered(after.hash))) == 1
    lines = [line for line in lines if "ran out of memory" in line]
    assert len(lines) == (len(errors[-1]) if rank == 0 else 0), lines
    # All was resident before the first shortage; before another one operators fetched, each with an event of its own.
    where = r"(forward \d|backward) of (the model|layers\.\d)" + (" on rank 0" if world_size > 1 else "")
    assert all(re.search(rf"KiB of activations \(the most at {where}\), after ", line) for line in lines), lines


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
def test_the_event_that_had_no_room_is_named_and_the_next_pass_is_recorded(rank: int, world_size: int) -> None:
    device = EmulatedDevice(TOTAL)
    model = ShardedModel(build(Peaked), **placed(Peaked, device=device, model_data_memory="smallest"))
    ShardedOptimizer(model, adam(model.parameters()))
    with told() as lines, device.holding_activations():
        for _ in range(4):
            with pytest.raises(FAILURES):
                loss_of(model, rank).backward()
        whose = " on rank 0" if world_size > 1 else ""
        named = [f"(the most at backward 0 of layers.3{whose})" in line for line in lines if "ran out" in line]
        assert named == [True] * (3 if rank == 0 else 0), lines
        device.total_bytes = 10 * TOTAL
        loss_of(model, rank).backward()
    assert model.chunk_manager.trace.peak is not None
    model.close()


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
def test_a_batch_that_is_left_out_leaves_no_trace(rank: int, world_size: int) -> None:
    device = EmulatedDevice(TOTAL)
    training = Training(device, rank)
    with device.holding_activations():
        training.run(30 if rank == 0 else 1, again=False, leaves_out=False)
    assert len(training.failures) == 1
    without = Training(EmulatedDevice(), rank)
    without.run(1, again=False, leaves_out=True)
    assert training.found() == without.found()


@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_weights_and_state_are_as_before_the_step_that_failed(inside: str) -> None:
    device = EmulatedDevice(TOTAL)
    training = Training(device, 0)
    for step in range(2):
        training.step(step, 1, again=False)
    before = weights_of(training.model), state_hash(training.model, training.optimizer)
    large = inputs(0).repeat(30, 1)
    if inside == "forward":
        with device.holding_activations(), pytest.raises(torch.OutOfMemoryError, match="emulated device out of"):
            training.model(large)
    else:
        loss = training.model(large)
        device.others_bytes = TOTAL
        with device.holding_activations(), pytest.raises(torch.OutOfMemoryError):
            training.optimizer.backward(loss)
        device.others_bytes = 0
    training.optimizer.step()
    assert training.optimizer.last_step is not None
    after = weights_of(training.model), state_hash(training.model, training.optimizer)
    assert before[1] == after[1]
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    held = training.model.plan.device_bytes
    training.step(2, 1, again=False)
    short = training.model.plan.device_bytes
    assert short < held
    for step in (4, 5):
        training.step(step, 1, again=False)
        assert training.model.plan.device_bytes == short, "the next reading has not seen what the last one missed"


@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
def test_other_failures_move_nothing_and_the_least_is_told() -> None:
    device = EmulatedDevice(TOTAL)
    training = Training(device, 0, tensor_placement_policy="cpu", model_data_memory=9000)
    with told() as lines, device.holding_activations():
        training.step(0, 1, again=False)
        plan = training.model.plan
        with pytest.raises(RuntimeError, match=r"shape|size"):
            training.model(torch.ones(2, 3))
        training.step(1, 1, again=False)
        assert training.model.plan is plan
        assert not lines
        for _ in range(6):
            with pytest.raises(torch.OutOfMemoryError):
                training.model(inputs(0).repeat(100, 1))
        training.step(2, 1, again=False)
    assert training.model.plan.device_bytes == plan.packed_minimum_bytes
    assert lines[-1].endswith("cannot be less: make the batch smaller, or checkpoint activations")


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
def test_an_engine_begins_the_window_again_whose_gradients_were_dropped(rank: int, world_size: int) -> None:
    """The second micro-batch finds no memory for its backward: both are made again, and no step has half of them."""

    def run(device: EmulatedDevice, fails: bool) -> tuple[list[float], int, int]:
        options = {"device": device, "chunk_size": CHUNK_NUMEL, "gradient_accumulation_steps": 2}
        engine, *_ = gemini.initialize(build(WithLoss), lambda its: adam(its), config=options)
        losses: list[float] = []
        for step in range(4):
            for attempt in range(2):
                for micro in range(2):
                    loss = engine(batch(step, rank + 2 * micro, 1))
                    if fails and step == 2 and attempt == 0 and micro == 1 and rank == world_size - 1:
                        device.others_bytes = TOTAL
                    try:
                        with device.holding_activations():
                            engine.backward(loss)
                    except FAILURES:
                        break
                    finally:
                        device.others_bytes = 0
                    engine.step()
                    losses.append(float(loss.detach()))
                else:
                    break
                del losses[-1:]
        assert engine.optimizer is not None
        found = losses, state_hash(engine.model, engine.optimizer), engine.global_steps
        engine.model.close()
        return found

    assert run(EmulatedDevice(TOTAL), True) == run(EmulatedDevice(), False)


def test_a_fixed_budget_shrinks_too_until_the_user_sets_another() -> None:
    device = EmulatedDevice(TOTAL)
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, model_data_memory=40_000)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    with device.holding_activations(), pytest.raises(torch.OutOfMemoryError):
        model(inputs(0).repeat(30, 1))
    model(inputs(0))
    assert model.plan.budget_bytes is not None
    assert model.plan.budget_bytes <= 32_000
    model.change_budgets(model_data_memory=40_000)
    assert model.plan.budget_bytes == 40_000
    train_while(model, optimizer, 0, steps=2)


def test_a_loss_that_fails_in_the_script_counts_on_one_rank() -> None:
    device = EmulatedDevice(TOTAL)
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL)
    ShardedOptimizer(model, adam(model.parameters()))
    with device.holding_activations():
        x = model(inputs(0))
        before, device.others_bytes = model.plan.device_bytes, TOTAL
        with pytest.raises(torch.OutOfMemoryError):
            x.square()
        device.others_bytes = 0
        model(inputs(0))
    assert model.plan.device_bytes < before


@pytest.mark.soak
@on_ranks(2)
def test_ranks_of_which_one_fails_in_its_own_loss_are_told_and_go_on(rank: int, world_size: int) -> None:
    """Nobody is told of what fails between forward and backward; the others find out in the backward."""
    device = EmulatedDevice(TOTAL)
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, model_data_memory=14_000)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    before = state_hash(model, optimizer)
    with device.holding_activations():
        x = model(inputs(0))
        device.others_bytes = TOTAL * rank
        with pytest.raises(torch.OutOfMemoryError if rank else DivergenceError):
            x.square().mean().backward()
        device.others_bytes = 0
        if rank:
            with pytest.raises(DivergenceError):
                model(inputs(0)).mean().backward()
    assert state_hash(model, optimizer) == before
    device.others_bytes = 0
    assert train_while(model, optimizer, rank, steps=2)


def test_a_cap_holds_for_a_number_of_steps_that_doubles() -> None:
    cap, free = ShortageCap(), Budget(1000, None)
    assert cap.bound(free) == free
    for steps in (100, 200):
        cap.set(500)
        for _ in range(steps - 1):
            cap.step()
            assert cap.bound(free).device == 500
            assert cap.bound(Budget(None, 7)) == Budget(500, 7)
            assert cap.bound(Budget(400, None)).device == 400
        cap.step()
        assert cap.bound(free) == free
