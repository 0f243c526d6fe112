"""What machines lack or show otherwise: a compiler for Triton, other ranks' GPUs, a division by a number."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemini import launch
from optim import dispatch
from sharding.collectives import sum_rows


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: object())
    dispatch.has_triton.cache_clear()
    yield monkeypatch
    dispatch.has_triton.cache_clear()


def test_triton_without_a_compiler_is_said_once_and_not_used(fresh: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("Failed to find C compiler")

    fresh.setattr(dispatch, "_launch_once", fails)
    with pytest.warns(UserWarning, match="cannot launch a kernel .*Failed to find C compiler.*gcc"):
        dispatch.prepare(torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not dispatch.has_triton()


def test_triton_that_launches_is_used_and_tried_once(fresh: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    fresh.setattr(dispatch, "_launch_once", lambda: tried.append(1))
    dispatch.prepare(torch.device("cuda"))
    assert dispatch.has_triton()
    assert tried == [1]


@pytest.mark.parametrize(("local_rank", "num_devices", "index"), [(0, 8, 0), (5, 8, 5), (0, 1, 0), (5, 1, 0)])
def test_a_rank_takes_its_own_gpu_or_the_only_one_it_is_shown(local_rank: int, num_devices: int, index: int) -> None:
    assert launch._device_index(local_rank, num_devices) == index


def test_a_rank_without_a_gpu_is_told() -> None:
    with pytest.raises(RuntimeError, match="local rank 2 has no device: this machine has 2"):
        launch._device_index(2, 2)


class Divisors(TorchDispatchMode):
    """What is divided by: CUDA multiplies by the reciprocal of a number or of a CPU scalar, and divides by a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in str(func):
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 6, 7])
def test_the_mean_over_ranks_is_one_correctly_rounded_division_on_every_device(
    num_ranks: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_ranks, 4096, generator=generator, dtype=torch.float64).to(dtype)
    out = torch.empty(4096, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    with Divisors() as divisors:
        sum_rows(rows, out, num_ranks, lambda numel, kind: torch.empty(numel, dtype=kind))
    total = rows[0].to(out.dtype)
    for row in rows[1:]:
        total = total + row.to(out.dtype)
    exact = total / num_ranks if out.dtype is torch.float64 else (total.double() / num_ranks).float()
    assert torch.equal(out, exact)
    assert divisors.seen
    assert all(isinstance(d, torch.Tensor) and d.dtype is out.dtype and d.dim() == 0 for d in divisors.seen)
