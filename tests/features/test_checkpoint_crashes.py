"""A crash at any operation, or of any rank, leaves a complete checkpoint; a refused load changes nothing at all."""

import contextlib
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import CheckpointError, HybridAdam, ShardedModel, ShardedOptimizer, load_checkpoint, save_checkpoint
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.ranks import RankPool
from tests.harness.shared_folder import shared_folder

Parts = tuple[ShardedModel, ShardedOptimizer]
WIDTH = 24


def make(seed: int = 0, adam: Any = HybridAdam) -> Parts:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    model = ShardedModel(module, device="emulated", dtype=torch.bfloat16, chunk_size=512)
    return model, ShardedOptimizer(model, adam(model.parameters(), lr=1e-2))


def backward(parts: Parts) -> None:
    parts[1].backward(parts[0](torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean())


def step(parts: Parts) -> None:
    backward(parts)
    parts[1].step()
    parts[1].zero_grad()


@contextlib.contextmanager
def refused(parts: Parts, error: type[Exception], match: str) -> Iterator[None]:
    """Model, optimizer and gradients are as they were, and training goes on."""
    backward(parts)
    before = gemini.state_hash(*parts)
    gradients = [parameter.grad.clone() for parameter in parts[0].parameters() if parameter.grad is not None]
    with pytest.raises(error, match=match):
        yield
    assert gemini.state_hash(*parts) == before
    now = [parameter.grad for parameter in parts[0].parameters()]
    assert all(its is not None and torch.equal(its, wanted) for its, wanted in zip(now, gradients, strict=True))
    parts[1].step()
    parts[1].zero_grad()
    assert gemini.state_hash(*parts) != before


@on_ranks(1, 2)
def test_a_refused_checkpoint_leaves_the_gradients_too(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        saved = make()
        step(saved)
        save_checkpoint(folder, *saved, tag="it")
        save_checkpoint(folder, saved[0], tag="weights")
        sgd = make(1, torch.optim.SGD)
        with refused(sgd, ValueError, "another optimizer's"):
            load_checkpoint(folder, *sgd, tag="it")
        parts = make(1)
        with refused(parts, CheckpointError, "saved without an optimizer"):
            load_checkpoint(folder, *parts, tag="weights")
        gathered(None)
        if rank == 0:
            manifest = folder / "it" / "checkpoint.json"
            text = manifest.read_bytes()
            assert b'"lr":0.01' in text
            manifest.write_bytes(text.replace(b'"lr":0.01', b'"lr":0.03', 1))
        gathered(None)
        with refused(parts, CheckpointError, r"checkpoint\.json is damaged: it is not as it was written"):
            load_checkpoint(folder, *parts, tag="it")


class _Crash:
    """From the given operation on the file system on, all fail: what is on the disk then stays as a crash leaves it."""

    NAMES = ("mkdir", "open", "pwritev", "posix_fallocate", "fsync", "rename", "replace", "unlink", "rmdir")

    def __init__(self, at: int) -> None:
        self._left = at
        self.has_come = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in self.NAMES:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                self.has_come = True
                raise OSError(5, "the machine has lost its power")
            return function(*arguments, **options)

        return counted


@pytest.mark.parametrize("tag", ["new", "b"], ids=["beside", "over"])
def test_a_crash_before_any_operation_leaves_a_complete_checkpoint(tmp_path: Path, tag: str) -> None:
    parts, resumed = make(), make(1)
    step(parts)
    hashes = {gemini.state_hash(*parts): "old"}
    for name in ("a", "b"):
        save_checkpoint(tmp_path / "old", *parts, tag=name)
    step(parts)
    hashes[gemini.state_hash(*parts)] = "new"
    found = []
    for at in range(200):
        folder, crash = tmp_path / str(at), _Crash(at)
        shutil.copytree(tmp_path / "old", folder)
        with pytest.MonkeyPatch().context() as patch:
            crash.install(patch)
            with contextlib.suppress(CheckpointError):
                save_checkpoint(folder, *parts, tag=tag, keep=1)
        load_checkpoint(folder, *resumed)
        found.append(hashes[gemini.state_hash(*resumed)])
        # The next save finds its way, and clears up.
        save_checkpoint(folder, *parts, tag="next", keep=1)
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "next"], at
        if not crash.has_come:
            break
    # Once the new one loads, no later crash brings the old one back.
    assert len(found) > 15 and found == sorted(found, reverse=True) and set(found) == {"old", "new"}


def saving_until_killed(rank: int, world_size: int, folder: str, victims: list[int], delay_s: float) -> None:
    """Saves after every step, until ranks are killed."""
    parts = make()
    step(parts)
    save_checkpoint(folder, *parts, extra=gemini.state_hash(*parts), keep=2)
    if rank in victims:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(10_000):
        step(parts)
        save_checkpoint(folder, *parts, extra=gemini.state_hash(*parts), keep=2, asynchronous=bool(number % 2))


@pytest.mark.parametrize(
    ("victims", "num_moments"),
    [
        ([0, 1], 2),
        ([0], 1),
        ([1], 1),
        *(pytest.param(victims, 34, marks=pytest.mark.soak) for victims in ([0, 1], [0], [1])),
    ],
    ids=str,
)
@pytest.mark.timeout(1800)
def test_killed_ranks_leave_a_checkpoint_that_loads(
    ranks: RankPool, tmp_path: Path, victims: list[int], num_moments: int
) -> None:
    moments = random.Random(num_moments)
    parts = make(1)
    for number in range(num_moments):
        folder = tmp_path / str(number)
        arguments: dict[str, Any] = {"folder": str(folder), "victims": victims, "delay_s": moments.uniform(0.05, 0.6)}
        ended = ranks(2).run(saving_until_killed, fresh=True, forked=True, timeout_s=60.0, **arguments)
        assert all((ended[rank].exitcode == -signal.SIGKILL) is (rank in victims) for rank in (0, 1)), ended
        loaded = load_checkpoint(folder, *parts)
        assert gemini.state_hash(*parts) == loaded.extra
        save_checkpoint(folder, *parts, tag="next", keep=1)
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "next"]
