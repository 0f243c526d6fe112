"""A training that is saved and loaded goes on with the same bits; elsewhere it has the same states."""

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

import gemini
from gemini import CheckpointError, HybridAdam, ShardedModel, ShardedOptimizer, load_checkpoint, save_checkpoint
from gemini.checkpoint import saving
from gemini.checkpoint.file_io import DiskIO
from tests.harness.on_ranks import gathered, on_ranks, on_ranks_with
from tests.harness.pairwise import all_pairs
from tests.harness.ranks import RankPool
from tests.harness.shared_folder import shared_folder

WIDTH = 40
STEPS = 3


class Net(nn.Module):
    """Tied, frozen, transposed, scalar and empty parameters, a buffer that counts, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(33, WIDTH)
        self.twin = nn.Linear(33, WIDTH, bias=False)
        self.twin.weight = self.first.weight
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.middle.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.1)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(5, 7)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, 9)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.twin(x) * self.scale
        if self.training:
            self.seen += 1
            self.mean.mul_(0.9).add_(h.detach().float().mean(0), alpha=0.1)
        h = torch.tanh(self.middle(h - self.mean.to(h.dtype)))
        out: Tensor = self.last(self.drop(self.frozen(h) + h))
        return out


def make(seed: int, adam: Any = HybridAdam, **options: Any) -> tuple[ShardedModel, ShardedOptimizer, Any]:
    torch.manual_seed(seed)
    model = ShardedModel(Net(), **{"chunk_size": 2048, "device": "emulated"} | options)
    decayed = [p for name, p in model.named_parameters() if "bias" not in name and p.requires_grad]
    others = [p for name, p in model.named_parameters() if "bias" in name and p.requires_grad]
    settings = {"momentum": 0.9} if adam is torch.optim.SGD else {}
    inner = adam([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], lr=1e-2, **settings)
    optimizer = ShardedOptimizer(model, inner, clip_grad_norm=1.0, initial_scale=2.0**10)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)


def backward(model: ShardedModel, optimizer: ShardedOptimizer, number: int, bad: bool = False) -> float:
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(100 * number + model.rank)
    x = torch.randn(4, 33, generator=generator).to(first.dtype)
    loss = model(x).float().square().mean()
    optimizer.backward(loss * (float("inf") if bad else 1.0))
    return float(loss)


def train(parts: tuple[Any, Any, Any], first: int, count: int = STEPS, accumulate: int = 1) -> list[float]:
    model, optimizer, schedule = parts
    losses = []
    for number in range(first, first + count):
        losses.append(backward(model, optimizer, number))
        if (number + 1) % accumulate == 0:
            optimizer.step()
            schedule.step()
    return losses


def states(parts: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Everything of a training, whole, by name."""
    model, optimizer, schedule = parts
    found: dict[str, Any] = dict(model.state_dict())
    saved = optimizer.state_dict()
    found |= {f"{number}.{name}": value for number, its in saved["state"].items() for name, value in its.items()}
    found |= {f"{number}.master": value for number, value in saved["masters"].items()}
    return found | {"groups": saved["param_groups"], "scale": saved.get("loss_scale"), "rate": schedule.state_dict()}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        assert same, f"{name} differs"


OPTIONS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "dtype": [None, torch.bfloat16, torch.float16],
    "tensor_placement_policy": ["auto", "cpu"],
    "reuse_fp16_shard": [False, True],
    "shard_strategy": [None, gemini.TensorShardStrategy(), gemini.BucketTensorShardStrategy()],
    "adam": [HybridAdam, torch.optim.AdamW, torch.optim.SGD],
    "accumulate": [1, 2],
    "asynchronous": [False, True],
}
CASES = all_pairs(OPTIONS, lambda case: case["dtype"] is torch.float16 or not case["reuse_fp16_shard"])


@on_ranks_with("setting", {1: CASES[::3], 2: CASES[::3]}, {1: CASES, 2: CASES, 3: CASES[::2]}, ids=lambda setting: "")
def test_a_resumed_training_goes_on_with_the_same_bits(rank: int, world_size: int, setting: dict[str, Any]) -> None:
    case = dict(setting)
    accumulate, asynchronous = case.pop("accumulate"), case.pop("asynchronous")
    with shared_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reuse_fp16_shard with accumulation
        parts = make(0, **case)
        train(parts, 0, accumulate=accumulate)  # 3 micro-batches: with two a step, a window is open
        found = save_checkpoint(folder, *parts[:2], scheduler=parts[2], extra=(1, "x"), asynchronous=asynchronous)
        saved = states(parts)
        expected = train(parts, STEPS, accumulate=accumulate)
        if not isinstance(found, Path):
            found = found.wait()
        resumed = make(1, **case)
        train(resumed, 7, 1)
        resumed[1].zero_grad()
        loaded = load_checkpoint(folder, *resumed[:2], scheduler=resumed[2])
        assert_equal(states(resumed), saved)
        assert (loaded.path, loaded.extra, loaded.world_size) == (found, (1, "x"), world_size)
        assert train(resumed, STEPS, accumulate=accumulate) == expected
        assert_equal(states(resumed), states(parts))


def _save(folder: str, setting: dict[str, Any]) -> None:
    parts = make(0, **setting)
    train(parts, 0)
    save_checkpoint(folder, *parts[:2], scheduler=parts[2], tag="it")
    saved = states(parts)
    if parts[0].rank == 0:
        torch.save(saved, Path(folder, "whole.pt"))


def save_case(rank: int, world_size: int, folder: str, setting: dict[str, Any]) -> None:
    """Saves, on these ranks."""
    _save(folder, setting)


def load_case(rank: int, world_size: int, folder: str, setting: dict[str, Any]) -> None:
    """Loads, on these ranks, what others have saved."""
    parts = make(1, **setting)
    load_checkpoint(folder, *parts[:2], scheduler=parts[2])
    wanted = torch.load(Path(folder, "whole.pt"), weights_only=False)
    found = states(parts)
    # The mean of a buffer that each rank has by itself is rank 0's on other numbers of ranks.
    assert_equal(found, wanted)
    train(parts, STEPS)


SAVED: dict[str, Any] = {"stage": 3, "dtype": torch.bfloat16}
LOADED: list[dict[str, Any]] = [
    {"stage": 1, "dtype": torch.bfloat16, "chunk_size": 4096},
    {"stage": 3, "dtype": torch.bfloat16, "tensor_placement_policy": "cpu", "chunk_size": 2560},
    {"stage": 2, "dtype": torch.bfloat16, "shard_strategy": gemini.TensorShardStrategy()},
]
SIZES = [(2, 1), (1, 2), (2, 3), (3, 2)]


@pytest.mark.parametrize("sizes", [*SIZES[:3], *(pytest.param(s, marks=pytest.mark.soak) for s in SIZES[3:])], ids=str)
def test_other_ranks_stages_and_chunks_load_the_same_states(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    for number, case in enumerate(LOADED):
        folder = tmp_path / str(number)
        folder.mkdir()
        for size, name, its in ((sizes[0], "save_case", SAVED), (sizes[1], "load_case", case)):
            if size == 1:
                globals()[name](0, 1, folder=str(folder), setting=its)
            else:
                ranks(size).run(f"{__name__}:{name}", timeout_s=60, folder=str(folder), setting=its)


@on_ranks(1, 2)
def test_torch_reads_the_files(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        parts = make(0)
        train(parts, 0)
        path = save_checkpoint(folder, *parts[:2])
        whole = parts[0].state_dict()
        names = [name for name, value in whole.items() if value.numel() and name != "twin.weight"]
        found = {f"model.{name}": torch.empty_like(whole[name]) for name in names}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
        # Buffers of other ranks have other names.
        for name in names:
            assert torch.equal(found[f"model.{name}"], whole[name]) or (name == "mean" and rank), name


@on_ranks(1, 2)
def test_skipped_steps_and_the_loss_scale_go_on(rank: int, world_size: int) -> None:
    with shared_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = make(0, dtype=torch.float16)
        for bad in (False, True, True, True):
            backward(*parts[:2], number=0, bad=bad)
            parts[1].step()
        save_checkpoint(folder, *parts[:2])
        resumed = make(1, dtype=torch.float16)
        load_checkpoint(folder, *resumed[:2])
        assert resumed[1].loss_scale == parts[1].loss_scale < 2.0**10
        for each in (parts, resumed):
            backward(*each[:2], number=1, bad=True)
            each[1].step()
        assert resumed[1].loss_scale == parts[1].loss_scale
        last, its_last = parts[1].last_step, resumed[1].last_step
        assert last is not None and its_last is not None
        assert (its_last.number, its_last.skipped) == (last.number, last.skipped) and last.number == 5


# -- in the background


@contextlib.contextmanager
def _slow_disk(monkeypatch: pytest.MonkeyPatch, room: int | None) -> Iterator[None]:
    write = DiskIO.write

    def slowly(*arguments: Any) -> int:
        time.sleep(0.003)
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DiskIO, "write", slowly)
        if room is not None:
            patch.setattr(saving, "spare_bytes", lambda *_: room)
        yield


@on_ranks(1, 2)
@pytest.mark.parametrize("policy", ["auto", "cpu"])
@pytest.mark.parametrize("room", [None, 1])
def test_what_is_written_while_training_goes_on_is_the_state_of_the_save(
    rank: int, world_size: int, policy: str, room: int | None
) -> None:
    options = {"dtype": torch.bfloat16, "tensor_placement_policy": policy}
    with shared_folder() as folder, _slow_disk(pytest.MonkeyPatch(), room):
        parts = make(0, **options)
        train(parts, 0)
        saved = states(parts)
        pending = save_checkpoint(folder, *parts[:2], scheduler=parts[2], asynchronous=True)
        assert not isinstance(pending, Path)
        train(parts, STEPS)
        with torch.no_grad():
            parts[0].module.last.weight.mul_(2.0)
        pending.wait()
        assert pending.is_done and (pending.copied_bytes > 0 or policy == "cpu")
        resumed = make(1, **options)
        load_checkpoint(folder, *resumed[:2], scheduler=resumed[2])
        assert_equal(states(resumed), saved)


@on_ranks(1, 2)
def test_a_failure_in_the_background_reaches_the_training_loop(rank: int, world_size: int) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device", "states")

    with shared_folder() as folder:
        parts = make(0)
        train(parts, 0)
        save_checkpoint(folder, *parts[:2])
        train(parts, STEPS)
        patch = pytest.MonkeyPatch()
        with patch.context() as inside:
            if rank == world_size - 1:
                inside.setattr(DiskIO, "write", fails)
            pending = save_checkpoint(folder, *parts[:2], asynchronous=True)
            assert not isinstance(pending, Path)
            with pytest.raises(CheckpointError, match="No space left"):
                pending.wait()
        train(parts, 2 * STEPS)
        assert load_checkpoint(folder, *parts[:2]).tag == f"step_{STEPS}"
        assert gathered(sorted(each.name for each in folder.iterdir())) == [["latest", f"step_{STEPS}"]] * world_size
