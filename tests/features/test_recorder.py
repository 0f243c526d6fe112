"""The bytes beside the model data are recorded at each event of a step, and leave their room to the plan."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import EmulatedDevice, ShardedModel, ShardedOptimizer, estimate_memory
from gemini.monitor.device import PeakMeter
from gemini.placement.next_use import Phase, Trace
from tests.harness.on_ranks import on_ranks
from tests.harness.told import told
from tests.zoo.mlp import (
    CHUNK_NUMEL,
    LAYERS,
    WIDTH,
    Mlp,
    adam,
    build,
    inputs,
    loss_of,
    placed,
    smallest_budget,
    train_step,
)

KIB = 2**10


class Peak(torch.autograd.Function):
    """Takes memory in its backward, and gives it back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_bytes: int) -> Tensor:
        ctx.num_bytes = num_bytes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        torch.zeros(ctx.num_bytes, dtype=torch.uint8)
        return grads[0], None


class Peaked(Mlp):
    """Its backward needs much for a moment: between those of the fourth and the third layer."""

    num_bytes = 100 * KIB

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if number == 2:
                x = Peak.apply(x, self.num_bytes)
        return x


class Counted(EmulatedDevice):
    """Counts how often a recording asks for a peak."""

    def __init__(self) -> None:
        super().__init__()
        self.num_taken = 0

    def peak_meter(self) -> PeakMeter:
        meter = super().peak_meter()
        pop_peak = meter.pop_peak

        def counted() -> int:
            self.num_taken += 1
            return pop_peak()

        meter.pop_peak = counted  # type: ignore[method-assign]
        return meter


def recorded(make: type[nn.Module] = Mlp, step: int = 0, **arguments: Any) -> Trace:
    model = ShardedModel(build(make), **placed(make, **arguments))
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    for number in range(step):
        train_step(model, optimizer, number)
    with model.chunk_manager.recorder.recording():
        train_step(model, optimizer, step)
    trace = model.chunk_manager.trace
    model.close()
    return trace


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("step", [0, 2])
def test_every_event_of_a_step_has_its_bytes(rank: int, world_size: int, step: int) -> None:
    """Recorded by hand, as the emulated device asks for: the peak is where the model has it, in mid-backward."""
    trace = recorded(Peaked, step, model_data_memory="smallest")
    assert trace.peak is not None
    event, num_bytes = trace.peak
    assert trace.describe(event) == "backward 0 of layers.3"
    assert Peaked.num_bytes < num_bytes < 1.2 * Peaked.num_bytes
    assert {event.phase for event in trace.non_model_bytes} >= {Phase.FORWARD, Phase.BACKWARD, Phase.STEP}
    used = Counter(touch.event.phase for touch in trace.touches)
    assert used == {Phase.FORWARD: LAYERS, Phase.BACKWARD: LAYERS - 1}, "the first layer's input has no gradient"
    forward = [trace.non_model_bytes[touch.event] for touch in trace.touches[:LAYERS]]
    assert forward == sorted(forward), "each layer leaves something to its backward"


def test_a_trace_is_the_same_wherever_the_model_data_rests() -> None:
    host = recorded(step=1, tensor_placement_policy="cpu")
    some = recorded(step=1, model_data_memory=smallest_budget(chunk_size=CHUNK_NUMEL) + 4 * CHUNK_NUMEL)
    assert host.touches == some.touches
    of_host, of_some = (
        {event: found for event, found in trace.non_model_bytes.items() if event.phase is not Phase.STEP}
        for trace in (host, some)  # an update works where the optimizer state is
    )
    assert of_host == of_some


@on_ranks(1, 2)
def test_the_first_step_is_recorded_and_later_ones_cost_nothing(rank: int, world_size: int) -> None:
    """Where an allocator counts. A larger batch is recorded again, and a smaller one is not."""
    device = Counted()
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, tensor_placement_policy="cpu")
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    taken, peaks = [], []
    with device.holding_activations():
        for rows in (8, 8, 16, 8, 16):
            device.num_taken = 0
            x = torch.ones(rows, WIDTH)
            model(x).square().mean().backward()
            taken.append(device.num_taken)
            peaks.append(model.chunk_manager.trace.peak)
            optimizer.step()
            optimizer.zero_grad()
    assert [count > 2 * LAYERS for count in taken] == [True, False, True, False, False], taken
    assert [count == 0 for count in taken] == [False, True, False, True, True], taken
    assert peaks[0] == peaks[1] != peaks[2] == peaks[4]
    assert peaks[2][1] > 1.5 * peaks[0][1]
    model.close()


@on_ranks(1, 2)
def test_a_peak_in_mid_backward_is_respected(rank: int, world_size: int) -> None:
    """From the second step on, model data leaves the room that the first one needed for a moment in its backward."""
    whole = estimate_memory(build(Peaked), world_size=world_size, **placed(Peaked)).device_bytes
    total = whole + 11 * Peaked.num_bytes // 10  # the first step just fits
    device = EmulatedDevice(total)
    model = ShardedModel(build(Peaked), device=device, chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    first = model.plan
    assert first.budget_bytes is not None and first.host_bytes == 0
    assert first.device_bytes == whole
    with told() as lines, device.holding_activations():
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = model.chunk_manager.trace.peak
    assert peak is not None
    # on one rank all was resident in the step that was recorded, and operators have no hooks then
    where = "backward of the model" if world_size == 1 else "backward 0 of layers.3 on rank 0"
    lines = [line for line in lines if "room for" in line]
    assert bool(lines) == (rank == 0)
    assert all(f" of activations (the most at {where}), after" in line for line in lines), lines
    assert model.plan.host_bytes > 0
    assert model.plan.device_bytes + peak[1] < 0.98 * total
    model.close()


@on_ranks(1, 2)
def test_a_step_that_fails_while_it_is_recorded_leaves_nothing(rank: int, world_size: int) -> None:
    device = EmulatedDevice()
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, tensor_placement_policy="cpu")
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    with device.holding_activations():
        with pytest.raises(ZeroDivisionError):
            _fail(model)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len({touch.event for touch in model.chunk_manager.trace.touches}) == 2 * LAYERS - 1
    assert model.chunk_manager.trace.peak is not None
    model.close()


def _fail(model: nn.Module) -> None:
    out = model(inputs(0))
    out.register_hook(lambda grad: 1 / 0)
    out.square().mean().backward()
