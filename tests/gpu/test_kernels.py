"""The Triton kernels on a real GPU: the bits of the written order, one launch a list, a host that never waits."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from optim import adam_scalars, triton_adam, triton_norm, zero_norm_limbs
from tests import triton_cases
from tests.gpu import loops
from tests.triton_cases import ADAM, ALIGNED, CASES, LAYOUTS, Trial

LARGE = 10_000_000


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_bits_of_the_written_order(name: str, cuda: torch.device) -> None:
    CASES[name](cuda)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_piece_has_the_bits_of_the_written_order(layout: str, cuda: torch.device) -> None:
    triton_cases.adam(cuda, layout=layout, grad_dtype=torch.bfloat16, options=ADAM, numels=(LARGE, LARGE // 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_gradient_has_the_limbs_of_the_reference(dtype: torch.dtype, cuda: torch.device) -> None:
    for fill in ("ordinary", "an exponent a tile"):
        triton_cases.norm_of(cuda, dtype=dtype, fill=fill, numels=(LARGE, LARGE))


def test_a_uniform_list_is_one_launch_and_the_host_does_not_wait(cuda: torch.device) -> None:
    trials = [Trial("split", torch.bfloat16, 1000 + seed, ALIGNED, seed) for seed in range(200)]
    pieces = [trial.piece(cuda) for trial in trials]
    limbs = zero_norm_limbs(cuda)
    with triton_cases.launches(triton_adam.adam_kernel) as launched, no_synchronisation():
        triton_norm.accumulate_sum_of_squares_(limbs, pieces[0].grad)
        triton_adam.update(pieces, adam_scalars(**ADAM))
    assert len(launched) == 1
    for trial in trials:
        trial.check(ADAM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_on_the_device_are_updated_by_one_launch(dtype: torch.dtype, cuda: torch.device) -> None:
    model, optimizer = loops.wrap(loops.GPT2, cuda, dtype, "cuda")
    loops.train_steps(loops.GPT2, model, optimizer, cuda, dtype, range(2), loops.Outcome())
    optimizer.backward(loops.GPT2.loss(model, loops.batch_on(loops.GPT2, 2, cuda, dtype)))
    with triton_cases.launches(triton_adam.adam_kernel) as launched:
        optimizer.step()
    assert len(model.chunk_manager.chunks) > 1
    assert len(launched) == 1
