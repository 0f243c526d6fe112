"""A disk that fails, changes bytes, or is shared with a forked child; and what a closed model says."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import GeminiError, ShardedModel, ShardedOptimizer
from gemini.memory.direct import aligned_bytes
from gemini.memory.disk import DiskTier
from tests.features.test_disk import _with_weights, failing, sharded
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo import mlp


def _fails(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _said(use: Callable[[], Any]) -> str:
    try:
        use()
    except GeminiError as error:
        return str(error)
    return ""


@on_ranks(1, 2)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_on_one_rank_is_named_on_all_and_the_model_is_torn(
    rank: int, world_size: int, name: str, deferred: bool, tmp_path: Path
) -> None:
    """Also a write of the last step, for which nobody waits but whoever asks for the states."""
    model, optimizer = sharded(tmp_path, deferred_update=deferred, rank_timeout=30)
    mlp.train_step(model, optimizer, 0)
    model.chunk_manager.memory.work.join()
    function = _fails if rank == world_size - 1 else getattr(os, name)
    with failing(name, function):
        first = _said(lambda: mlp.train_step(model, optimizer, 1))
        model.chunk_manager.memory.work.join()
        first = first or _said(lambda: gemini.state_hash(model, optimizer))
    doing = "reading" if name == "preadv" else "writing"
    words = [f"disk: {doing} ", " of chunk ", "layers.", " bytes of ", str(tmp_path), f"errno {errno.EIO}"]
    for said in gathered(first):
        assert all(each in said for each in words), said
    for use in (model.state_dict, lambda: mlp.train_step(model, optimizer, 2)):
        said = _said(use)
        assert "failed half way" in said and all(each in said for each in words), said
    model.close()


# -- Checksums: every byte that a request reads is compared.


@pytest.mark.parametrize("width", [64, 72])
def test_checksums_find_a_wrong_byte_in_a_fetch(width: int, tmp_path: Path) -> None:
    """Homes of whole blocks, and others."""
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    states = 4 * 4 * width * width  # of a layer
    where: dict[str, Any] = {"tensor_placement_policy": "cpu", "device": "emulated", "chunk_size": width * width}
    model = ShardedModel(module, **where, disk_path=tmp_path, host_memory=3 * states, disk_checksums=True)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    for _ in range(2):
        model(torch.ones(2, width)).square().sum().backward()
        optimizer.step()
    read = os.preadv

    def wrong(file: int, data: list[memoryview], position: int) -> int:
        count = read(file, data, position)
        data[0][103] ^= 1
        return count

    with failing("preadv", wrong), torch.no_grad(), pytest.raises(GeminiError, match=r"of chunk .* \(checksum\)"):
        model(torch.ones(2, width))
    model.close()


@pytest.mark.parametrize("at", [0, 4_999, 5_000, 11_000, 19_999])
def test_checksums_find_a_byte_wherever_reads_and_writes_begin_and_end(at: int, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, checks=True)
    home, memory = tier.allocate(20_000, "optim"), aligned_bytes(20_000, False)
    parts = [(0, 5_000), (5_000, 12_000), (12_000, 20_000)]
    memory.random_()

    def ends(requests: Any) -> None:
        for request in requests:
            request.result()

    for start, end in parts:
        ends(tier.write(home[start:end], memory[start:end]))
    reads = [(0, 20_000), (at, at + 1), (max(0, at - 300), min(20_000, at + 300))]
    back = aligned_bytes(20_000, False)
    for start, end in reads:
        ends(tier.read(back[start:end], home[start:end]))
    (byte,) = os.pread(tier._file.number, 1, at)
    os.pwrite(tier._file.number, bytes([byte ^ 1]), at)
    for start, end in reads:
        with pytest.raises(GeminiError, match="checksum"):
            ends(tier.read(back[start:end], home[start:end]))
    home[at] = byte ^ 1  # through the mapping: nothing is known of these bytes now, and their first read is what counts
    for start, end in reads:
        ends(tier.read(back[start:end], home[start:end]))
    os.pwrite(tier._file.number, bytes([byte]), at)
    with pytest.raises(GeminiError, match="checksum"):
        ends(tier.read(back, home))
    tier.close()


# -- A forked child, such as a worker of a DataLoader, shares the file.


def _in_child(what: Callable[[], str]) -> str:
    """What a forked child says."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writable, what().encode())
        finally:
            os._exit(0)
    os.close(writable)
    said = b""
    while more := os.read(readable, 2**16):
        said += more
    os.close(readable)
    os.waitpid(child, 0)
    return said.decode()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("deferred", [False, True])
def test_a_forked_child_is_told_that_it_shares_the_disk(deferred: bool, tmp_path: Path) -> None:
    model, optimizer = sharded(tmp_path, deferred_update=deferred)
    for step in range(2):
        mlp.train_step(model, optimizer, step)
    weights = {name: each.clone() for name, each in mlp.weights_of(model).items()}
    uses: list[Callable[[], Any]] = [
        lambda: gemini.state_hash(model, optimizer),
        optimizer.state_dict,
        lambda: mlp.train_step(model, optimizer, 2),
    ]
    before = gemini.state_hash(model, optimizer)
    for use in uses:
        said = _in_child(lambda use=use: _said(use))  # type: ignore[misc]
        assert f"was forked from process {os.getpid()}" in said and str(tmp_path) in said and "state_dict()" in said
        assert gemini.state_hash(model, optimizer) == before

    def its_own() -> str:
        mlp.assert_same(mlp.weights_of(model), weights)  # the weights are on the host, where each process has its own
        own, its = sharded(tmp_path)
        for step in range(2):
            mlp.train_step(own, its, step)
        return str(gemini.state_hash(own, its))

    assert _in_child(its_own) == before
    mlp.train_step(model, optimizer, 2)
    model.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_weights_on_the_disk_are_shared(tmp_path: Path) -> None:
    model, optimizer = sharded(tmp_path, **_with_weights(None, 1), max_live_parameters=2 * mlp.CHUNK_NUMEL)
    mlp.train_step(model, optimizer, 0)
    for use in (model.state_dict, lambda: mlp.loss_of(model, 1)):
        assert "was forked from process" in _in_child(lambda use=use: _said(use))  # type: ignore[misc]
    mlp.train_step(model, optimizer, 1)
    model.close()


# -- After `close()`.


@pytest.mark.parametrize("policy", ["cpu", "disk", "cuda"])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_of_a_closed_model_says_that_it_is_closed(policy: str, deferred: bool, tmp_path: Path) -> None:
    disk = {"disk_path": tmp_path} if policy == "disk" else {}
    where = mlp.placed(tensor_placement_policy=policy, deferred_update=deferred, max_live_parameters=None, **disk)
    model = ShardedModel(mlp.build(), **where)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    mlp.train_step(model, optimizer, 0)
    mlp.loss_of(model, 1).backward()
    model.close()
    for _ in range(2):
        with pytest.raises(GeminiError, match=r"the model is closed: close\(\) comes after the last use"):
            optimizer.step()


def test_a_use_of_a_closed_model_that_needs_a_slot_says_that_it_is_closed() -> None:
    model, optimizer = mlp.sharded()
    mlp.train_step(model, optimizer, 0)
    model.close()
    for use in (model.state_dict, lambda: model(mlp.inputs(0))):
        with pytest.raises(GeminiError, match=r"the model is closed: close\(\) comes after the last use"):
            use()
