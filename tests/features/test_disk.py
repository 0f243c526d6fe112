"""Masters and optimizer state on the disk: the same bits, the bytes of the plan, and a file that nobody finds."""

import errno
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gemini
from gemini import (
    BudgetError,
    DivergenceError,
    GeminiError,
    RemoteRankError,
    Settings,
    ShardedModel,
    ShardedOptimizer,
    deepspeed,
)
from gemini.access.parameter_link import any_link_of
from gemini.memory.direct import BLOCK_BYTES, aligned_bytes
from gemini.memory.disk import DiskTier
from gemini.memory.slot import SharedStorage
from gemini.memory.workers import WorkPiece
from gemini.placement.demand import Kind, Tier
from gemini.placement.policy import RING
from optim import HybridAdam
from tests.features.test_deferred_update import DETOURS, SOME, end_of
from tests.harness import slow_updates
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.ranks import RankPool
from tests.zoo import mlp
from tests.zoo.half import Trained

# (arguments of ShardedModel without a disk, those with one, whether a gradient rests in its parameters' home)
NUM_BYTES = 16 * mlp.CHUNK_NUMEL * mlp.LAYERS
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "all": ({"tensor_placement_policy": "cpu"}, {"tensor_placement_policy": "disk"}, False),
    "lent homes": ({"tensor_placement_policy": "cpu"}, {"tensor_placement_policy": "disk"}, True),
    "weights on the device": (
        {"tensor_placement_policy": "static", "offload_optim_frac": 1.0},
        {"tensor_placement_policy": "static", "offload_optim_frac": 1.0, "host_memory": NUM_BYTES // 2},
        False,
    ),
    "some of each": (
        {"model_data_memory": NUM_BYTES // 2},
        {"model_data_memory": NUM_BYTES // 2, "host_memory": NUM_BYTES // 4},
        False,
    ),
}
Setting = tuple[str, torch.dtype | None, int, bool, tuple[str, ...]]  # place, dtype, micro-batches, deferred, detours
HALF = torch.bfloat16, torch.float16
SAMPLE: dict[int, list[Setting]] = {
    1: [
        ("all", None, 1, False, SOME),
        ("all", torch.bfloat16, 1, True, tuple(DETOURS)),
        ("lent homes", torch.float16, 1, True, SOME),
        ("weights on the device", torch.bfloat16, 2, False, SOME),
        ("some of each", torch.bfloat16, 1, True, SOME),
    ],
    2: [("all", torch.bfloat16, 1, False, SOME), ("some of each", None, 2, True, SOME)],
}
EVERY: list[Setting] = [
    (place, dtype, micro, deferred, tuple(DETOURS))
    for place in PLACES
    for dtype in (None, *HALF)
    for micro in (1, 2)
    for deferred in (False, True)
]
# Four ranks pad these layers to four times their size: the budgets of the other places are not for them.
EVERY_IN_ANY_SHARDS = [each for each in EVERY if each[0] in ("all", "lent homes")]


def _id_of(setting: Setting) -> str:
    place, dtype, micro_batches, deferred, names = setting
    words = place, dtype, micro_batches, "deferred" if deferred else "at once", "some" if names == SOME else "all"
    return "-".join(map(str, words))


@pytest.mark.filterwarnings("ignore:reuse_fp16_shard=True. parameters are used again")
@on_ranks_with("setting", SAMPLE, soak={1: EVERY, 2: EVERY, 4: EVERY_IN_ANY_SHARDS[::3]}, ids=_id_of, timeout_s=600)
def test_bits_do_not_tell_where_states_rest(rank: int, world_size: int, setting: Setting, tmp_path: Path) -> None:
    place, dtype, micro_batches, deferred, names = setting
    without, with_disk, reuse = PLACES[place]
    reuse = reuse and dtype is not None
    for number, name in enumerate(names):
        expected = end_of(Trained(rank, world_size, reuse, {**without, "dtype": dtype}), DETOURS[name], micro_batches)
        arguments = {**with_disk, "dtype": dtype, "disk_path": tmp_path, "deferred_update": deferred}
        with slow_updates.installed(seed=number) if deferred else nullcontext():
            trained = Trained(rank, world_size, reuse, arguments)
            plan = trained.model.plan
            # Several ranks share the states, and their hosts have room for more of them.
            assert plan.placement.disk_bytes(plan.demand) > 0 or world_size > 1
            assert end_of(trained, DETOURS[name], micro_batches) == expected, name
    assert not os.listdir(tmp_path)


def sharded(path: Path, **options: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    options = {"tensor_placement_policy": "disk", "disk_path": path, **options}
    model = ShardedModel(mlp.build(), **mlp.placed(**options))
    return model, ShardedOptimizer(model, mlp.adam(model.parameters()))


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_moves_the_bytes_of_the_plan(deferred: bool, tmp_path: Path) -> None:
    model, optimizer = sharded(tmp_path, deferred_update=deferred, dtype=torch.bfloat16)
    for step in range(3):
        mlp.loss_of(model, step, torch.bfloat16).backward()
        optimizer.step()
    model.chunk_manager.memory.work.join()
    report = optimizer.last_step
    assert report is not None
    links = model.plan.predicted.bytes_by_link
    states = model.plan.placement.disk_bytes(model.plan.demand)
    assert links["disk->host"] == links["host->disk"] == states
    mlp.loss_of(model, 3, torch.bfloat16).backward()
    optimizer.step()
    model.chunk_manager.memory.work.join()
    moved = model.chunk_manager.memory.transfer.bytes_by_link
    assert moved["disk->host"] == moved["host->disk"] == 4 * states
    assert "disk    optim" in model.memory_report()
    model.close()


def test_a_model_trains_whose_states_are_three_times_the_hosts_budget(tmp_path: Path) -> None:
    budgets: dict[str, Any] = {"chunk_size": 2**16, "host_memory": "8MiB", "device": "emulated"}

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(32)))

    def wrapped(**options: Any) -> tuple[ShardedModel, ShardedOptimizer]:
        model = ShardedModel(build(), tensor_placement_policy="static", offload_optim_frac=1.0, **options, **budgets)
        return model, ShardedOptimizer(model, mlp.adam(model.parameters()))

    with pytest.raises(BudgetError, match="host:"):
        wrapped()
    model, optimizer = wrapped(disk_path=tmp_path)
    for _ in range(2):
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
    host, disk = model.chunk_manager.memory.host, model.chunk_manager.memory.disk
    assert disk is not None
    assert host.ledger.peak_bytes <= 8 * 2**20 < disk.ledger.peak_bytes
    assert host.ledger.total_bytes + disk.ledger.total_bytes == 3 * 8 * 2**20
    model.close()


def test_a_checkpoint_is_saved_from_the_disk_and_loaded_to_it(tmp_path: Path) -> None:
    found = []
    for policy, others in (("disk", "cpu"), ("cpu", "disk")):
        model, optimizer = sharded(tmp_path, tensor_placement_policy=policy, deferred_update=True)
        for step in range(2):
            mlp.train_step(model, optimizer, step)
        folder = tmp_path / policy
        gemini.save_checkpoint(folder, model, optimizer)
        other, its = sharded(tmp_path, tensor_placement_policy=others, deferred_update=True)
        gemini.load_checkpoint(folder, other, its)
        for step in range(2, 4):
            mlp.train_step(model, optimizer, step)
            mlp.train_step(other, its, step)
        found += [gemini.state_hash(model, optimizer), gemini.state_hash(other, its)]
        model.close()
        other.close()
    assert len(set(found)) == 1


def test_an_estimate_counts_what_rests_on_the_disk(tmp_path: Path) -> None:
    estimated = gemini.estimate_memory(mlp.build(), **mlp.placed(tensor_placement_policy="disk", disk_path=tmp_path))
    model, _ = sharded(tmp_path)
    assert estimated.disk_bytes == model.plan.placement.disk_bytes(model.plan.demand) > 0
    on_host = gemini.estimate_memory(mlp.build(), **mlp.placed(tensor_placement_policy="cpu"))
    assert estimated.state_bytes == on_host.state_bytes == estimated.host_bytes + estimated.disk_bytes
    model.close()


def test_a_request_keeps_its_memory_until_it_has_ended(tmp_path: Path) -> None:
    tier, may_go_on, read = DiskTier(tmp_path), threading.Event(), os.preadv

    def waits(*arguments: Any) -> int:
        assert may_go_on.wait(30)
        return read(*arguments)

    with failing("preadv", waits):
        memory, there = aligned_bytes(10_000, False), tier.allocate(10_000, "optim")
        storage = memory.untyped_storage()._cdata
        before = torch._C._storage_Use_Count(storage)
        requests = tier.read(memory, there)
        assert torch._C._storage_Use_Count(storage) > before
        may_go_on.set()
        for request in requests:
            request.result()
    tier.close()


# -- The life of the file.


def test_a_file_has_no_name_and_ends_with_the_model(tmp_path: Path) -> None:
    def num_open() -> int:
        files = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(str(tmp_path) in os.readlink(file) for file in files if file.is_symlink())

    before = num_open()
    model, optimizer = sharded(tmp_path)
    mlp.train_step(model, optimizer, 0)
    assert not os.listdir(tmp_path) and num_open() > before
    model.close()
    model.close()
    assert num_open() == before
    dropped, _ = sharded(tmp_path)
    assert num_open() > before
    dropped.close()
    assert num_open() == before


def test_a_process_that_is_killed_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    program = """
import sys
from tests.features.test_disk import sharded
from tests.zoo import mlp
model, optimizer = sharded(sys.argv[1])
print("ready", flush=True)
step = 0
while True:
    mlp.train_step(model, optimizer, step)
    step += 1
"""
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stdout.close()
    assert not os.listdir(tmp_path)


# -- Failures.


@contextmanager
def failing(name: str, function: Callable[..., int]) -> Iterator[None]:
    with mock.patch.object(os, name, function):
        yield


def test_a_full_disk_is_found_before_training(tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(os, "posix_fallocate", full), pytest.raises(BudgetError) as error:
        sharded(tmp_path)
    assert str(tmp_path) in str(error.value) and f"errno {errno.ENOSPC}" in str(error.value)
    assert error.value.tier == "disk"


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_ends_the_training_and_names_the_chunk(name: str, deferred: bool, tmp_path: Path) -> None:
    model, optimizer = sharded(tmp_path, deferred_update=deferred)
    mlp.train_step(model, optimizer, 0)

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def trains() -> None:
        for step in range(1, 4):
            mlp.train_step(model, optimizer, step)
        optimizer.step()

    with failing(name, fails), pytest.raises(GeminiError, match=rf"disk: .*{tmp_path}.*errno {errno.EIO}"):
        trains()
    with pytest.raises(GeminiError):
        mlp.train_step(model, optimizer, 4)
    model.close()


def test_a_request_that_ends_early_goes_on_and_another_alignment_is_found(tmp_path: Path) -> None:
    preadv, pwritev, refused = os.preadv, os.pwritev, []

    def less(function: Callable[..., int]) -> Callable[..., int]:
        def call(file: int, buffers: list[memoryview], position: int) -> int:
            if len(buffers[0]) > 4096 and not refused:
                refused.append(file)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return function(file, [buffers[0][: max(1, len(buffers[0]) // 2)]], position)

        return call

    with failing("preadv", less(preadv)), failing("pwritev", less(pwritev)):
        tier = DiskTier(tmp_path)
        buffer, source, back = (
            tier.allocate(20_000, "optim"),
            aligned_bytes(20_000, False),
            aligned_bytes(20_000, False),
        )
        source.random_()
        for request in tier.write(buffer, source):
            request.result()
        for request in tier.read(back, buffer):
            request.result()
    assert torch.equal(back, source) and torch.equal(buffer, source) and refused
    tier.close()


def test_memory_that_is_taken_again_is_zero_and_both_ways_to_it_agree(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    first = tier.allocate(10_000, "optim")
    first.fill_(7)
    tier.free(first, "optim")
    held = tier.allocate(3_000, "optim")
    assert not held.any() and bool((first == 7).all())  # a view that somebody has shows what was there
    held.fill_(1)
    del first
    again, other = tier.allocate(3_000, "optim"), tier.allocate(9_000, "optim")
    assert not again.any() and not other.any()
    memory = aligned_bytes(9_000, False)
    other[5_000] = 3  # through the mapped file
    for request in tier.read(memory, other):
        request.result()
    assert memory[5_000] == 3 and memory.sum() == 3
    memory.fill_(9)
    for request in tier.write(other, memory):
        request.result()
    assert bool((other == 9).all()) and not again.any()
    tier.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"disk_memory": "1GB"}, ValueError, "needs disk_path="),
        ({"tensor_placement_policy": "disk"}, ValueError, "needs disk_path="),
        ({"disk_path": 3}, TypeError, "disk_path must be a folder, found 3"),
        ({"disk_path": "/nowhere", "disk_memory": "much"}, ValueError, "disk_memory"),
    ],
)
def test_bad_settings(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Settings(**options)


def test_bad_folders_and_budgets(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path / "missing", file):
        with pytest.raises(ValueError, match="takes no file"):
            sharded(path)
    with pytest.raises(BudgetError, match="Allow more with disk_memory=") as refusal:
        sharded(tmp_path, disk_memory=1000)
    sharded(tmp_path, disk_memory=refusal.value.needed_bytes)[0].close()


def _is_refused(rank: int, world_size: int, path: Path) -> str:
    with pytest.raises(Exception, match="takes no file") as error:
        sharded(path if rank == 0 else path / "missing")
    return type(error.value).__name__


@pytest.mark.soak
def test_a_folder_that_is_missing_on_one_rank_ends_all(ranks: RankPool, tmp_path: Path) -> None:
    exits = ranks(2).run(_is_refused, tmp_path, fresh=True, forked=True)
    assert [each.result for each in exits] == ["RemoteRankError", "ValueError"]


# -- How much rests there, and other libraries' words for it.


def _on_disk(model: ShardedModel) -> int:
    disk = model.chunk_manager.memory.disk
    return 0 if disk is None else disk.ledger.total_bytes


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_a_fraction_of_the_states_rests_there_at_least(fraction: float, tmp_path: Path) -> None:
    model, optimizer = sharded(tmp_path, tensor_placement_policy="cpu", disk_optim_frac=fraction)
    plain, its = mlp.plain()
    for step in range(2):
        mlp.train_step(model, optimizer, step)
        mlp.train_step(plain, its, step)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
    states = 8 * mlp.CHUNK_NUMEL * mlp.LAYERS  # two moments in fp32
    num_chunks = -(-round(1000 * fraction) * mlp.LAYERS // 1000)
    assert _on_disk(model) == num_chunks * states // mlp.LAYERS
    homes = [
        chunk.index
        for chunk in model.chunk_manager.chunks
        if optimizer.chunk_optimizer.states.by_chunk[chunk.index].tier is Tier.DISK
    ]
    assert homes == list(range(mlp.LAYERS - num_chunks, mlp.LAYERS))  # the last ones: they are used last


@pytest.mark.parametrize("as_params", [False, True])
def test_colossal_ais_arguments_of_an_optimizer_give_the_model_a_disk(as_params: bool, tmp_path: Path) -> None:
    nvme = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": str(tmp_path)}
    module = mlp.build()
    config: dict[str, Any] = {"device": "emulated", "tensor_placement_policy": "cpu"}
    optimizer: HybridAdam | None = HybridAdam(module.parameters(), lr=1e-2, weight_decay=0.01, **nvme)
    if as_params:
        optimizer, params = None, {"lr": 1e-2, "weight_decay": 0.01, **nvme}
        config["optimizer"] = {"type": "HybridAdam", "params": params}
    engine = gemini.initialize(module, optimizer=optimizer, config=config)[0]
    plain, its = mlp.plain()
    for step in range(2):
        engine.backward(mlp.loss_of(engine, step))
        engine.step()
        mlp.train_step(plain, its, step)
    mlp.assert_same(mlp.weights_of(engine.model), mlp.weights_of(plain))
    assert _on_disk(engine.model) > 0


_ASKED: dict[str, dict[str, Any]] = {
    "all": {"tensor_placement_policy": "cpu"},
    "masters, in the backward": {
        "tensor_placement_policy": "cpu",
        "dtype": torch.bfloat16,
        "update_in_backward": True,
        "deferred_update": True,
    },
    "no training without it": {"model_data_memory": NUM_BYTES // 2, "host_memory": NUM_BYTES // 4},
}


def _nvme(path: Path, fraction: float = 1.0) -> dict[str, Any]:
    return {"nvme_offload_fraction": fraction, "nvme_offload_dir": str(path)}


def _asking(model: ShardedModel, **nvme: Any) -> ShardedOptimizer:
    return ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.01, **nvme))


@on_ranks_with("place", {1: [*_ASKED], 2: [*_ASKED][:2]})
def test_an_optimizer_that_asks_for_a_disk_gives_it_to_a_model_that_was_wrapped_before(
    rank: int, world_size: int, place: str, tmp_path: Path
) -> None:
    found = []
    for disk, nvme in ({"disk_path": tmp_path, "disk_optim_frac": 1.0}, {}), ({}, _nvme(tmp_path)):
        model = ShardedModel(mlp.build(), **mlp.placed(**_ASKED[place], **disk))
        with torch.no_grad():  # the plan may be one for inference by then
            mlp.loss_of(model, rank, _ASKED[place].get("dtype"))
        optimizer = _asking(model, **nvme)
        for step in range(3):
            mlp.train_step(model, optimizer, step * world_size + rank, _ASKED[place].get("dtype"))
        assert (model.settings.disk_path is not None, model.settings.disk_fraction) == (True, 1.0)
        found.append((gemini.state_hash(model, optimizer), model.plan.placement, _on_disk(model)))
        model.close()
    assert found[0] == found[1]
    assert found[1][2] > 0 and not os.listdir(tmp_path)


def test_a_model_with_a_disk_keeps_its_folder_when_an_optimizer_asks_for_more_there(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"nvme_offload_fraction=0.5 needs nvme_offload_dir="):
        HybridAdam(mlp.build().parameters(), nvme_offload_fraction=0.5)
    with pytest.raises(ValueError, match=r"nvme_offload_fraction must be a number from 0 to 1, found 2"):
        HybridAdam(mlp.build().parameters(), nvme_offload_fraction=2, nvme_offload_dir=str(tmp_path))
    where = {"tensor_placement_policy": "cpu", "disk_path": tmp_path, "disk_optim_frac": 0.5}
    model = ShardedModel(mlp.build(), **mlp.placed(**where))
    with pytest.raises(ValueError, match=r"the model has there, 0.5, and .*other' is not the model's folder"):
        _asking(model, **_nvme(tmp_path / "other"))
    optimizer = _asking(model, **_nvme(tmp_path / "other" / ".."))
    mlp.train_step(model, optimizer)
    assert _on_disk(model) == 8 * mlp.CHUNK_NUMEL * mlp.LAYERS
    optimizer.close()
    mlp.train_step(model, _asking(model))  # the disk stays the model's
    assert _on_disk(model) == 8 * mlp.CHUNK_NUMEL * mlp.LAYERS
    model.close()


@on_ranks(1, 2)
def test_a_folder_of_an_optimizer_that_takes_no_file_leaves_the_model_without_a_disk(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model = ShardedModel(mlp.build(), **mlp.placed(tensor_placement_policy="cpu"))
    is_missing = rank == world_size - 1  # on one rank alone
    with pytest.raises(ValueError if is_missing else RemoteRankError, match="takes no file"):
        _asking(model, **_nvme(tmp_path / "missing" if is_missing else tmp_path))
    if world_size > 1:
        with pytest.raises(DivergenceError, match=r"nvme_offload_fraction=0.5 against nvme_offload_fraction=0\. "):
            _asking(model, **_nvme(tmp_path, 0.5 - rank / 2))
    assert model.settings.disk_path is None and model.chunk_manager.memory.disk is None
    optimizer = _asking(model)
    plain, its = mlp.plain()
    for step in range(2):
        mlp.train_step(model, optimizer, step)
        mlp.train_step(plain, its, step)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
    model.close()


@pytest.mark.parametrize("deferred", [False, True])
def test_the_backward_updates_what_rests_there(deferred: bool, tmp_path: Path) -> None:
    found = []
    for in_backward in (False, True):
        model, optimizer = sharded(
            tmp_path, dtype=torch.bfloat16, update_in_backward=in_backward, deferred_update=deferred
        )
        for step in range(3):
            mlp.train_step(model, optimizer, step, torch.bfloat16)
        found.append(gemini.state_hash(model, optimizer))
        model.close()
    assert found[0] == found[1]


# -- Bytes that are not what was written.


@pytest.mark.parametrize("deferred", [False, True])
def test_checksums_find_a_byte_that_the_disk_has_changed(deferred: bool, tmp_path: Path) -> None:
    for checks in (False, True):
        model, optimizer = sharded(tmp_path, deferred_update=deferred, disk_checksums=checks)
        mlp.train_step(model, optimizer, 0)
        model.chunk_manager.memory.work.join()
        disk = model.chunk_manager.memory.disk
        assert disk is not None
        at = 8 * mlp.CHUNK_NUMEL + 5
        (byte,) = os.pread(disk._file.number, 1, at)
        os.pwrite(disk._file.number, bytes([byte ^ 1]), at)

        def trains(model: ShardedModel = model, optimizer: ShardedOptimizer = optimizer) -> None:
            for step in range(1, 3):
                mlp.train_step(model, optimizer, step)
            optimizer.step()

        if checks:
            with pytest.raises(GeminiError, match=r"disk: reading .* are not the bytes that were written"):
                trains()
        else:
            trains()
        model.close()


@pytest.mark.parametrize("name", DETOURS)
def test_checksums_know_what_was_written_in_another_way(name: str, tmp_path: Path) -> None:
    """Edits, checkpoints and state dicts write through the mapping: no alarm, and the same bits."""
    found = []
    for checks in (False, True):
        options = {"tensor_placement_policy": "disk", "disk_path": tmp_path, "disk_checksums": checks}
        found.append(end_of(Trained(0, 1, False, {**options, "dtype": torch.bfloat16}), DETOURS[name], 1))
    assert found[0] == found[1]


def test_a_range_that_is_taken_again_has_no_checksum(tmp_path: Path) -> None:
    tier, memory = DiskTier(tmp_path, checks=True), aligned_bytes(8192, False).fill_(7)
    for _ in range(2):
        buffer = tier.allocate(8192, "optim")
        for request in (*tier.read(memory, buffer), *tier.write(buffer, memory.fill_(7))):
            request.result()
        tier.free(buffer, "optim")
        del buffer
    tier.close()


# -- Weights: where the host has no room for them either, the last chunks' rest on the disk.


def _with_weights(dtype: torch.dtype | None, world_size: int, stage: int = 3) -> dict[str, Any]:
    """A host with room for gradients, half of the weights and the ring."""
    numel = mlp.CHUNK_NUMEL * mlp.LAYERS // (world_size if stage == 3 else 1)
    itemsize = 4 if dtype is None else 2
    states = 12 * mlp.CHUNK_NUMEL // world_size  # of a chunk
    return {"tensor_placement_policy": "cpu", "host_memory": itemsize * numel * 5 // 4 + RING * states}


@on_ranks_with(
    "setting",
    {1: [(None, False, SOME), (torch.bfloat16, True, tuple(DETOURS))], 2: [(torch.bfloat16, False, SOME)]},
    soak={
        world: [(dtype, deferred, tuple(DETOURS)) for dtype in (None, *HALF) for deferred in (False, True)]
        for world in (1, 2)
    },
    ids=lambda setting: f"{setting[0]}-{'deferred' if setting[1] else 'at once'}",
    timeout_s=600,
)
def test_bits_do_not_tell_where_weights_rest(
    rank: int, world_size: int, setting: tuple[torch.dtype | None, bool, tuple[str, ...]], tmp_path: Path
) -> None:
    dtype, deferred, names = setting
    for number, name in enumerate(names):
        without = {"tensor_placement_policy": "cpu", "dtype": dtype, "max_live_parameters": 2 * mlp.CHUNK_NUMEL}
        found = [end_of(Trained(rank, world_size, False, without), DETOURS[name], 1)]
        its = {**without, **_with_weights(dtype, world_size), "disk_path": tmp_path, "deferred_update": deferred}
        with slow_updates.installed(seed=number) if deferred else nullcontext():
            trained = Trained(rank, world_size, False, {**its, "max_prefetch": number % 2})
            tiers = [homes[Kind.PARAM] for homes in trained.model.plan.placement.homes]
            assert Tier.HOST in tiers and Tier.DISK in tiers
            found.append(end_of(trained, DETOURS[name], 1))
        assert found[0] == found[1], name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_weights_that_are_fetched_from_the_disk_are_those_of_the_plan(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    options = {**_with_weights(dtype, 1), "max_live_parameters": 2 * mlp.CHUNK_NUMEL, "dtype": dtype}
    model, optimizer = sharded(tmp_path, **options)
    for step in range(3):
        mlp.loss_of(model, step, dtype).backward()
        optimizer.step()
    assert optimizer.last_step is not None
    moved, predicted = optimizer.last_step.moved_bytes, model.plan.predicted.bytes_by_link
    assert {link: count for link, count in moved.items() if count} == predicted
    assert moved["disk->device"] > 0
    for tier in Tier:
        held = model.chunk_manager.memory.tier(tier).ledger.total_bytes
        assert held == sum(model.plan.placement.bytes_by_kind(model.plan.demand, tier).values())


def test_frozen_weights_leave_for_the_disk(tmp_path: Path) -> None:
    """As of a base model whose adapters are trained: no step writes them."""
    found = []
    for has_disk in (False, True):
        module = mlp.build()
        module.layers[:5].requires_grad_(False)
        numel = mlp.CHUNK_NUMEL * mlp.LAYERS
        options: dict[str, Any] = {"tensor_placement_policy": "cpu", "max_live_parameters": 2 * mlp.CHUNK_NUMEL}
        if has_disk:
            options |= {"disk_path": tmp_path, "host_memory": 4 * numel // 2 + 8 * mlp.CHUNK_NUMEL}
        model = ShardedModel(module, **mlp.placed(**options))
        optimizer = ShardedOptimizer(model, mlp.adam(p for p in model.parameters() if p.requires_grad))
        for step in range(2):
            mlp.train_step(model, optimizer, step)
        found.append(gemini.state_hash(model, optimizer))
        if has_disk:
            assert Tier.DISK in [homes[Kind.PARAM] for homes in model.plan.placement.homes]
    assert found[0] == found[1]


def test_a_disk_that_fails_in_a_fetch_names_the_folder(tmp_path: Path) -> None:
    model, optimizer = sharded(tmp_path, **_with_weights(None, 1), max_live_parameters=2 * mlp.CHUNK_NUMEL)
    mlp.train_step(model, optimizer, 0)

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with failing("preadv", fails), pytest.raises(GeminiError, match=rf"disk: reading .*{tmp_path}.*errno {errno.EIO}"):
        mlp.loss_of(model, 1)
    mlp.train_step(model, optimizer, 1)  # nothing was lost
    plain, its = mlp.plain()
    for step in range(2):
        mlp.train_step(plain, its, step)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))


@on_ranks(1, 2)
def test_a_model_is_built_on_the_disk(rank: int, world_size: int, tmp_path: Path) -> None:
    found = []
    for home in ("host", "disk"):
        disk = {"disk_path": tmp_path} if home == "disk" else {}
        with gemini.ZeroInitContext(home=home, **disk):
            module = mlp.build()
        held = [region.tier for chunk in _chunks_of(module) for region in chunk.homes.values()]
        assert held and set(held) == {Tier(home)}
        model = ShardedModel(module, **mlp.placed(tensor_placement_policy="disk", disk_path=tmp_path))
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for step in range(2):
            mlp.train_step(model, optimizer, step * world_size + rank)
        found.append(gemini.state_hash(model, optimizer))
        model.close()
    assert found[0] == found[1] and not list(tmp_path.iterdir())


def _chunks_of(module: torch.nn.Module) -> list[Any]:
    links = [any_link_of(parameter) for parameter in module.parameters()]
    return list({link.managed.chunk.index: link.managed.chunk for link in links if link is not None}.values())


@pytest.mark.parametrize(("home", "path"), [("disk", None), ("host", "/tmp")])
def test_a_home_on_the_disk_needs_the_folder(home: str, path: str | None) -> None:
    with pytest.raises(ValueError, match="home='disk' and disk_path= belong together"):
        gemini.ZeroInitContext(home=home, disk_path=path)


def test_deepspeeds_init_takes_the_disk_of_the_config(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = mlp.build()
    assert {region.tier for chunk in _chunks_of(module) for region in chunk.homes.values()} == {Tier.DISK}
    engine = deepspeed.initialize(model=module, config={**config, "optimizer": {"type": "Adam"}})[0]
    loss = mlp.loss_of(engine, 0)
    engine.backward(loss)
    engine.step()
    assert _on_disk(engine.model) > 0


def test_a_buffer_that_dies_without_being_freed_leaves_no_place_behind(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    for _ in range(3):
        buffer = tier.allocate(3 * 4096, "optim")
        del buffer
    assert not tier._places and not tier._addresses and tier._end == 3 * 4096
    tier.close()


@on_ranks(2)
@pytest.mark.parametrize(("stage", "reuse", "host_memory"), [(3, True, 7_700), (2, False, 12_300)])
def test_weights_that_cannot_rest_there_stay_on_the_host(
    rank: int, world_size: int, stage: int, reuse: bool, host_memory: int, tmp_path: Path
) -> None:
    """A home that gradients are lent, or that a step makes whole, would be written to in a backward or gather."""

    def make() -> None:
        where = {"tensor_placement_policy": "cpu", "disk_path": tmp_path, "host_memory": host_memory}
        options = {"stage": stage, "reuse_fp16_shard": reuse, "dtype": torch.bfloat16}
        model = ShardedModel(mlp.build(), **mlp.placed(**where, **options))
        ShardedOptimizer(model, mlp.adam(model.parameters()))

    with pytest.raises(BudgetError, match="host: "):
        make()


def test_weights_that_are_only_read_keep_no_tickets(tmp_path: Path) -> None:
    module = mlp.build()
    module.layers[:5].requires_grad_(False)
    where = {"tensor_placement_policy": "cpu", "max_live_parameters": 2 * mlp.CHUNK_NUMEL, "disk_path": tmp_path}
    where["host_memory"] = 2 * mlp.CHUNK_NUMEL * mlp.LAYERS + 8 * mlp.CHUNK_NUMEL
    model = ShardedModel(module, **mlp.placed(**where))
    optimizer = ShardedOptimizer(model, mlp.adam(p for p in model.parameters() if p.requires_grad))
    for step in range(10):
        mlp.train_step(model, optimizer, step)
    homes = [chunk.homes[Kind.PARAM] for chunk in model.chunk_manager.chunks]
    assert max(len(home.tickets.reads) for home in homes if home.tier is Tier.DISK) <= 2


def test_nothing_holds_the_memory_of_a_request_that_is_over(tmp_path: Path) -> None:
    """A thread that let go of a slot a moment later made a backward fail now and then: the slot counted as held."""
    tier = DiskTier(tmp_path)
    home, memory = tier.allocate(BLOCK_BYTES, "parameters"), aligned_bytes(BLOCK_BYTES, pins=False)
    shared, holders, ours = SharedStorage(memory), dict[WorkPiece, int](), list[WorkPiece]()
    end = WorkPiece.end

    def noted(self: WorkPiece, error: BaseException | None = None) -> None:
        holders[self] = shared.num_holders()  # whoever waits goes on behind this line
        end(self, error)

    with mock.patch.object(WorkPiece, "end", noted):
        for (request,) in (copy() for copy in (partial(tier.write, home, memory), partial(tier.read, memory, home))):
            request.result()
            ours.append(request)
    assert [holders[each] for each in ours] == [0, 0]  # threads of models of other tests may end work meanwhile
    tier.close()


def test_a_piece_of_work_that_fails_is_dropped_before_it_is_over() -> None:
    used = torch.zeros(1)
    alive, there = weakref.ref(used), list[bool]()

    def fails(tensor: torch.Tensor) -> None:
        del tensor  # else the error's traceback would keep it
        raise OSError("no such disk")

    class Noted(WorkPiece):
        def end(self, error: BaseException | None = None) -> None:
            there.append(alive() is not None)
            super().end(error)

    piece = Noted(partial(fails, used))
    del used
    piece.carry_out()
    assert there == [False] and piece.is_over
    with pytest.raises(OSError, match="no such disk"):
        piece.result()
