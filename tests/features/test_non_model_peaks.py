"""The most bytes beside the model data at each position of a run, as `MemoryMonitor.record_peaks` finds them."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini import EmulatedDevice, MemoryMonitor, ShardedModel
from gemini.monitor.device import CudaSource, PositionPeaks
from tests.harness.live_storages import LiveStorages
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import minimum_bytes
from tests.zoo.nvidia import GIB, Device, FakeRuntime

WIDTH, ROWS = 64, 16
MIB = 2**20


class Blocks(nn.Module):
    """Every block keeps its hidden values for backward, or makes them again in it."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        make = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.blocks = nn.ModuleList(nn.Sequential(*(type(m)(*_sizes(m)) for m in make)) for _ in range(4))
        self.recomputes = recomputes
        self.peaks: PositionPeaks | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.peaks is not None:
                self.peaks.at(("forward", number))
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        return x


def _sizes(module: nn.Module) -> tuple[int, ...]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()


def recorded(recomputes: bool, step: int, **options: Any) -> dict[Any, int]:
    """Peaks of the first step of a sharded model, in which slots take their memory, or of the second."""
    torch.manual_seed(0)
    module = Blocks(recomputes)
    options |= {"device": "emulated", "chunk_size": 4 * WIDTH * WIDTH}
    budget = minimum_bytes(module, **options) if options["tensor_placement_policy"] == "cpu" else None
    model = ShardedModel(module, model_data_memory=budget, **options)
    x = torch.randn(ROWS, WIDTH)
    for _ in range(step):
        model(x).square().mean().backward()
    with MemoryMonitor("emulated").record_peaks() as peaks:
        module.peaks = peaks
        loss = model(x).square().mean()
        peaks.at("backward")
        loss.backward()
        module.peaks = None
    return dict(peaks.by_position)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_what_is_beside_the_model_data_does_not_depend_on_where_that_rests(recomputes: bool, step: int) -> None:
    """Slots, homes and copies are model data: however many chunks travel, activations are what they are."""
    resident = recorded(recomputes, step, tensor_placement_policy="cuda")
    moving = recorded(recomputes, step, tensor_placement_policy="cpu")
    assert moving == resident
    hidden, state = 4 * 4 * WIDTH * ROWS, 4 * WIDTH * ROWS
    forward = [resident["forward", number] for number in range(3)]  # what follows the last block is in the fourth
    kept = 2 * hidden if not recomputes else 0  # before and after the GELU
    assert forward[2] - forward[1] == kept + state
    assert 0 < forward[0] < forward[2] < resident["backward"]


@on_ranks(2)
def test_on_several_ranks_neither_shards_nor_collectives_count(rank: int, world_size: int) -> None:
    for step in range(2):
        assert recorded(False, step, tensor_placement_policy="cpu") == recorded(
            False, step, tensor_placement_policy="cuda"
        )


def test_on_the_emulated_device_a_peak_is_that_of_all_live_storages() -> None:
    """Counted from outside, over a plain module, whose every tensor but the weights is beside the model data."""
    gc.collect()  # models of other tests would fill their memory with NaN when they go, which the count sees
    with LiveStorages() as live:
        module, x = Blocks(recomputes=False), torch.randn(ROWS, WIDTH)
        before = live.bytes_now
        live.peak_bytes = 0
        with MemoryMonitor("emulated").record_peaks() as peaks:
            peaks.at("all")
            module(x).square().mean().backward()
    assert peaks.by_position["all"] == live.peak_bytes - before > sum(weight.nbytes for weight in module.parameters())


def test_memory_that_is_freed_before_a_position_does_not_count_there() -> None:
    with MemoryMonitor("emulated").record_peaks() as peaks:
        peaks.at("large")
        kept = torch.zeros(MIB, dtype=torch.uint8)
        temporary = torch.zeros(8 * MIB, dtype=torch.uint8)
        del temporary
        peaks.at("small")
        more = torch.zeros(2 * MIB, dtype=torch.uint8)
        peaks.at("view")
        views = kept[:100], kept.view(2, -1)
        peaks.at("resized")
        more.resize_(4 * MIB)
        del views
    assert {name: found // MIB for name, found in peaks.by_position.items()} == {
        "large": 9,
        "small": 3,
        "view": 3,
        "resized": 5,
    }


def test_memory_that_no_storage_could_grow_by_is_free_when_the_storage_has_died() -> None:
    device = EmulatedDevice(4 * MIB)
    with device.holding_activations():
        small = torch.zeros(MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match=f"{8 * MIB} bytes of activations"):
            small.resize_(8 * MIB)
        del small
        torch.zeros(4 * MIB, dtype=torch.uint8)


def test_a_position_that_is_met_again_keeps_its_greatest_peak() -> None:
    with MemoryMonitor("emulated").record_peaks() as peaks:
        for size in (2, 5, 1):
            peaks.at("block")
            torch.zeros(size * MIB, dtype=torch.uint8)
    assert peaks.by_position == {"block": 5 * MIB}


def test_nothing_is_counted_before_the_first_position_and_after_the_end() -> None:
    peaks = MemoryMonitor("emulated").record_peaks()
    with peaks:
        torch.zeros(9 * MIB, dtype=torch.uint8)
        peaks.at("here")
    torch.zeros(9 * MIB, dtype=torch.uint8)
    assert peaks.by_position == {"here": 0}


def test_on_cuda_the_peak_of_a_step_is_not_lost_to_those_of_its_positions() -> None:
    """A meter resets the allocator's peak, and whoever reads the device for a step goes on to see the greatest."""
    runtime = FakeRuntime(Device())
    source = CudaSource(runtime, None)
    runtime.peaks = [0, 70 * GIB, 30 * GIB, 20 * GIB]
    source.reset_peak()
    with MemoryMonitor(source).record_peaks() as peaks:
        peaks.at("a")
        peaks.at("b")
    assert source.read().peak_bytes == 70 * GIB
    source.reset_peak()
    assert source.read().peak_bytes == runtime.allocator().peak < 70 * GIB


def test_on_cuda_a_peak_is_the_allocators_less_the_model_data() -> None:
    """And the smaller figure of the model data counts where it changes, so that none is too small."""
    runtime = FakeRuntime(Device())
    runtime.peaks = [0, 70 * GIB, 30 * GIB, 34 * GIB, 90 * GIB]  # of before, of a first part, of three positions
    with MemoryMonitor(CudaSource(runtime, None)).record_peaks() as peaks:
        peaks.at("a", 20 * GIB)
        peaks.at("b", 20 * GIB)
        peaks.at("c", 28 * GIB)
    assert {name: found // GIB for name, found in peaks.by_position.items()} == {"a": 10, "b": 14, "c": 62}
