"""clip_grad_norm_: torch's formula on the exact norm, and no silent nothing."""

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gemini.runtime.chunk import dense_stride
from optim import clip_coefficient, clip_grad_norm_, in_memory_order


def with_gradients(*gradients: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    return parameters


def random_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in ((300, 7), (5,), (), (0,), (1000,))]


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 10.0, 1e6])
@pytest.mark.parametrize("norm_type", [2, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_torchs_to_rounding(dtype: torch.dtype, norm_type: float, max_norm: float) -> None:
    ours, theirs = with_gradients(*random_gradients(dtype)), with_gradients(*random_gradients(dtype))
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.numel()], max_norm, norm_type)
    rtol = 1e-6 if dtype == torch.float32 else 1e-2  # torch rounds the norm of half gradients to half
    assert norm.dim() == 0
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected.float(), rtol=rtol, atol=0)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.grad, q.grad, rtol=2 * rtol, atol=1e-9 if max_norm else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_is_multiplied_by_the_fp32_coefficient_and_rounded_once(dtype: torch.dtype) -> None:
    gradients = random_gradients(dtype)
    parameters = with_gradients(*gradients)
    true = math.sqrt(math.fsum(x * x for g in gradients for x in g.view(-1).tolist()))
    norm = float(clip_grad_norm_(parameters, 1.0))
    assert abs(norm - true) <= 2.0**-22 * true
    if dtype == torch.float32:
        coefficient = torch.tensor(clip_coefficient(true, 1.0))
        for parameter, gradient in zip(parameters, gradients):
            assert torch.equal(parameter.grad, gradient * coefficient)
    else:
        single = with_gradients(torch.full((256,), 3.0, dtype=dtype))  # norm 48, exactly
        clip_grad_norm_(single, 1.0)
        once = (torch.tensor(3.0) * np.float32(1 / (48 + 1e-6))).to(dtype)
        assert torch.all(single[0].grad == once)


def test_parameter_order_and_flattening_change_no_bit() -> None:
    # Tiles belong to parameters, so their order is free, and a transposed gradient is flattened as its
    # parameter.
    gradients = random_gradients()
    forth, back = with_gradients(*gradients), with_gradients(*gradients[::-1])
    back[-1].grad = back[-1].grad.t().contiguous().t()
    assert torch.equal(clip_grad_norm_(forth, 1.0), clip_grad_norm_(back, 1.0))
    for p, q in zip(forth, back[::-1]):
        assert torch.equal(p.grad, q.grad)


def test_tiles_are_cut_in_the_order_of_the_parameters_memory() -> None:
    """In another order they would hold other elements, and sums of 16-bit gradients would have other bits."""
    generator = torch.Generator().manual_seed(15)  # of the first forty, the one where fp32 shows the difference
    gradient = torch.randn(2, 5, 5, 10, generator=generator).to(torch.bfloat16)
    channels_last = gradient.to(memory_format=torch.channels_last)
    in_order = channels_last.permute(0, 2, 3, 1).reshape(-1)

    def norm_of(like: Tensor, its_gradient: Tensor) -> Tensor:
        parameter = nn.Parameter(torch.empty_like(like))
        parameter.grad = its_gradient.clone()
        return clip_grad_norm_(parameter, 1e9)

    expected, other = norm_of(in_order, in_order), norm_of(gradient.reshape(-1), gradient.reshape(-1))
    assert expected != other
    # The order is the parameter's, whatever that of the gradient is.
    assert norm_of(channels_last, channels_last) == norm_of(channels_last, gradient) == expected
    assert norm_of(gradient, channels_last) == norm_of(gradient, gradient) == other


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3), max_size=4),
    axes=st.randoms(use_true_random=False),
    step=st.sampled_from([1, 1, 2]),
    gap=st.sampled_from([0, 0, 1]),
)
def test_the_order_in_memory_is_that_of_a_chunk(sizes: list[int], axes: Random, step: int, gap: int) -> None:
    whole = torch.zeros([size * step + gap for size in sizes])
    like = whole[tuple(slice(0, size * step, step) for size in sizes)]
    like = like.permute(axes.sample(range(len(sizes)), len(sizes)))
    value = torch.arange(like.numel(), dtype=torch.float32).view(like.shape)
    in_chunk = torch.empty_strided(like.shape, dense_stride(like)).copy_(value)
    flat = in_chunk.as_strided((like.numel(),), (1,))
    assert torch.equal(in_memory_order(value, like), flat)
    assert in_memory_order(in_chunk, in_chunk).data_ptr() == in_chunk.data_ptr()


def test_a_norm_at_or_below_the_limit_changes_no_bit() -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(parameters, 6.0) == 5.0
    assert parameters[0].grad.tolist() == [3.0, 4.0]


def test_a_single_tensor_a_generator_and_a_repeated_parameter_are_taken() -> None:
    (parameter,) = with_gradients(torch.tensor([3.0, 4.0]))
    for given_parameters in (parameter, iter([parameter]), [parameter, parameter]):
        parameter.grad = torch.tensor([3.0, 4.0])
        assert clip_grad_norm_(given_parameters, 1.0) == 5.0
        expected = torch.tensor([3.0, 4.0]) * clip_coefficient(5.0, 1.0)
        assert torch.equal(parameter.grad, expected)


def test_parameters_without_gradient_are_passed_over_unless_none_has_one() -> None:
    parameters = [nn.Parameter(torch.ones(2)), *with_gradients(torch.tensor([3.0, 4.0]))]
    assert clip_grad_norm_(parameters, 1.0) == 5.0
    assert parameters[0].grad is None
    for empty in ([], [nn.Parameter(torch.ones(2))]):
        with pytest.raises(RuntimeError, match=r"none of the \d parameters has a gradient.*backward"):
            clip_grad_norm_(empty, 1.0)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_an_error_only_if_asked(bad: float, norm_type: float) -> None:
    gradients = [torch.ones(3), torch.tensor([1.0, 1.0, bad]), torch.ones(600)]
    parameters = with_gradients(*gradients)
    with pytest.raises(RuntimeError, match=rf"parameter 1 of shape \(3,\) has {bad} at flat index 2"):
        clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True)
    for parameter, gradient in zip(parameters, gradients):
        assert torch.equal(parameter.grad.nan_to_num(), gradient.nan_to_num())
    theirs = with_gradients(*gradients)
    torch.testing.assert_close(
        clip_grad_norm_(parameters, 1.0, norm_type),
        torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type),
        equal_nan=True,
    )
    for p, q in zip(parameters, theirs):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_a_norm_beyond_fp32_still_clips_finite_gradients() -> None:
    parameters = with_gradients(torch.full((1024,), 3e38))
    norm = clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert norm == math.inf  # in fp32; the coefficient comes from the fp64 norm, 9.6e39
    assert torch.allclose(parameters[0].grad, torch.tensor(1 / 32), rtol=1e-2)


@settings(max_examples=200, deadline=None)
@given(norm=st.floats(0, 1e30), max_norm=st.floats(0, 1e10))
def test_the_coefficient_is_exact_to_fp64_and_never_above_one(norm: float, max_norm: float) -> None:
    assert clip_coefficient(norm, max_norm) == min(1.0, max_norm / (norm + 1e-6))


def test_the_coefficient_of_a_non_finite_norm_is_torchs() -> None:
    assert math.isnan(clip_coefficient(math.nan, 1.0))
    assert clip_coefficient(math.inf, 1.0) == 0.0


@pytest.mark.parametrize("norm_type", [1.0, 0.0, -math.inf, math.nan])
def test_other_norms_are_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match="norm_type must be 2 or inf"):
        clip_grad_norm_(with_gradients(torch.ones(2)), 1.0, norm_type)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_limit_that_is_none_is_refused(max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm must be"):
        clip_grad_norm_(with_gradients(torch.ones(2)), max_norm)


@pytest.mark.parametrize("gradient", [torch.ones(2, dtype=torch.float64), torch.eye(2).to_sparse()])
def test_gradients_it_cannot_sum_are_refused(gradient: Tensor) -> None:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    with pytest.raises(ValueError, match="dense fp32, bf16 or fp16"):
        clip_grad_norm_([parameter], 1.0)
