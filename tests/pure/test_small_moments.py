"""Moments of 8 and 16 bits: what a byte means, and that every CPU kernel gives the bits of the reference."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from optim import AdamPiece, HybridAdam, Spans, adam_scalars, cpu_adam, reference
from optim.piece import BLOCK, Draws
from optim.reference import dequantize_, dynamic_map
from tests.pure.kernels import (
    GRADS,
    KERNELS,
    LAYOUTS,
    LEVELS,
    copy_of,
    differing,
    make_piece,
    quantized,
    updated,
    with_moments,
)

SMALL = [torch.uint8, torch.bfloat16]


def of_bitsandbytes(is_signed: bool) -> Tensor:
    """`bitsandbytes.functional.create_dynamic_map(is_signed, 7, 8)`, as published."""
    data = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if is_signed else i + 1) + 1, dtype=torch.float64)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        data += [*means.tolist(), *((-means).tolist() if is_signed else [])]
    return torch.tensor(sorted([*data, 0.0, 1.0]), dtype=torch.float32)


def dequantized(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    out = torch.empty(codes.numel())
    dequantize_(out, codes, scales, is_signed)
    return out


def wide(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp(torch.randn(numel, generator=generator) * 4)


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_maps_are_those_of_bitsandbytes(is_signed: bool) -> None:
    found, expected = dynamic_map(is_signed).entries.sort().values, of_bitsandbytes(is_signed)
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0.0)
    # A byte of a first moment is the index in the sorted map with its low seven bits inverted: 0 means zero.
    index = torch.arange(256) ^ (127 if is_signed else 0)
    assert torch.equal(dynamic_map(is_signed).entries, found[index])


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_nearest_number_of_the_map_is_chosen(is_signed: bool) -> None:
    x = wide(256 * 200)
    x = x if is_signed else x.abs()
    codes, scales = quantized(x, is_signed)
    found = dequantized(codes, scales, is_signed).view(-1, BLOCK) / scales[:, None]
    y = x.view(-1, BLOCK) / scales[:, None]
    entries = dynamic_map(is_signed).entries.sort().values
    best = (y[..., None] - entries).abs().amin(-1)
    # But for what lies in the middle, to the rounding of the arithmetic, and for second moments that are not zero.
    slack = 1e-6 * y.abs() + 1e-12 if is_signed else 1e-6 * y + 3.3e-7 * (y < 1.7e-7)
    assert ((found - y).abs() <= best + slack).all()


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-10, 1e30, 1e-30])
def test_quantising_what_was_dequantised_gives_the_same_bytes(is_signed: bool, size: float) -> None:
    x = wide(5000) * size
    codes, scales = quantized(x if is_signed else x.abs(), is_signed)
    again, theirs = quantized(dequantized(codes, scales, is_signed), is_signed)
    assert torch.equal(codes, again) and torch.equal(scales, theirs)


def test_zeros_tiny_and_non_finite_blocks() -> None:
    for is_signed in (True, False):
        codes, scales = quantized(torch.tensor([0.0, -0.0] * 128), is_signed)
        assert not codes.any() and scales.item() == 0.0 and not math.copysign(1, scales.item()) < 0
        tiny = torch.full((256,), 1e-45)
        assert torch.equal(dequantized(*quantized(tiny, is_signed), is_signed), tiny)
        for bad in (math.inf, -math.inf, math.nan):
            x = torch.ones(512)
            x[3] = bad
            found = dequantized(*quantized(x, is_signed), is_signed)
            x[3] = 0.0
            assert torch.equal(found, x)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_gradient_that_is_not_finite_costs_its_own_element_and_no_other_of_its_block(bad: float, kernel: str) -> None:
    piece = with_moments(make_piece(700, seed=3), torch.uint8)
    for at in (3, 300, 699):
        piece.grad[at] = bad
    clean = copy_of(piece)
    clean.grad[[3, 300, 699]] = 0.0
    found, wide = updated(KERNELS[kernel], piece), updated(KERNELS["reference"], in_fp32(piece))
    # As with fp32 moments NaN gradients make their own weights NaN. The square of the largest one is infinite, which
    # divides by it: the weight stays.
    assert torch.equal(found.weight.isnan(), wide.weight.isnan())
    assert found.weight.isnan().sum() == (0 if bad == 1e30 else 3)
    assert found.exp_avg_scale is not None and found.exp_avg_sq_scale is not None
    for codes, scales, is_signed in (
        (found.exp_avg, found.exp_avg_scale, True),
        (found.exp_avg_sq, found.exp_avg_sq_scale, False),
    ):
        assert dequantized(codes, scales, is_signed).isfinite().all()
        assert not codes[[3, 300, 699]].any()
    others = [at for at in range(700) if at not in (3, 300, 699)]
    assert torch.equal(found.weight[others], updated(KERNELS[kernel], clean).weight[others])


def in_fp32(piece: AdamPiece) -> AdamPiece:
    assert piece.exp_avg_scale is not None and piece.exp_avg_sq_scale is not None
    first = dequantized(piece.exp_avg, piece.exp_avg_scale, True)
    second = dequantized(piece.exp_avg_sq, piece.exp_avg_sq_scale, False)
    return piece._replace(exp_avg=first, exp_avg_sq=second, exp_avg_scale=None, exp_avg_sq_scale=None)


@pytest.mark.skipif(not LEVELS, reason="gemini was installed without its CPU kernels")
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.37, -3e-39])
def test_every_byte_means_the_number_of_the_map(scale: float, level: str) -> None:
    byte = torch.arange(256).to(torch.uint8)
    scales = torch.tensor([scale])
    zeros = torch.zeros(256)
    # A step from zero, whose length is a first moment, and one whose length is divided by the root of a second one.
    for first, second in ((byte, torch.full_like(byte, 200)), (torch.full_like(byte, 77), byte)):
        piece = AdamPiece(zeros, zeros, first, second, None, None, None, scales, scales.abs())
        options: dict[str, Any] = {"betas": (0.5, 0.5), "step": 1, "weight_decay": 0.0, "eps": 1e-3}
        expected = updated(reference.update, piece, **options)
        assert scale == -3e-39 or expected.weight.unique().numel() > 120
        assert differing(updated(partial(cpu_adam.update, level=level), piece, **options), expected) == []


@pytest.mark.skipif(not LEVELS, reason="gemini was installed without its CPU kernels")
def test_the_numbers_beside_every_middle_between_two_are_rounded_as_in_the_reference(level: str) -> None:
    middles = []
    for is_signed in (True, False):
        entries = dynamic_map(is_signed).entries.sort().values.double()
        between = (entries[1:] + entries[:-1]) / 2
        middles.append(between if is_signed else between.sqrt())  # a second moment is the square of the gradient
        middles.append(torch.tensor([*dynamic_map(is_signed).borders[1:]], dtype=torch.float64))
    near = [torch.cat(middles).float()]
    for direction in (torch.inf, -torch.inf):
        for _ in range(6):
            near.append(torch.nextafter(near[-1], torch.tensor(direction)))
        near.append(near[0])
    rows = torch.cat([*near, -torch.cat(near)])
    # Each block's scale is its first element, 1.
    rows = torch.nn.functional.pad(rows, (0, -rows.numel() % 255)).view(-1, 255)
    grad = torch.cat([torch.ones(len(rows), 1), rows], dim=1).flatten()
    piece = with_moments(make_piece(grad.numel()), torch.uint8)._replace(grad=grad)
    for inv_scale in (1.0, 0.7, 2.0**-70):
        options: dict[str, Any] = {"betas": (0.0, 0.0), "inv_scale": inv_scale}
        expected = updated(reference.update, piece, **options)
        assert differing(updated(partial(cpu_adam.update, level=level), piece, **options), expected) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_block_of_denormals_is_updated_as_such(kernel: str) -> None:
    piece = make_piece(256, seed=5)._replace(exp_avg=torch.full((256,), 1e-44), exp_avg_sq=torch.full((256,), 3e-45))
    piece = with_moments(piece._replace(grad=torch.full((256,), 1e-42)), torch.uint8)
    for step in range(1, 6):
        KERNELS[kernel]([piece], adam_scalars(step=step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0))
        assert piece.exp_avg_scale is not None and piece.exp_avg_sq_scale is not None
        for values in (in_fp32(piece).exp_avg, in_fp32(piece).exp_avg_sq, piece.weight):
            assert values.isfinite().all()
    assert (in_fp32(piece).exp_avg > 1e-43).all()


def test_a_second_moment_above_zero_stays_above_zero() -> None:
    x = torch.full((256,), 1e-20)
    x[0] = 1.0
    assert (dequantized(*quantized(x, False), False) > 0).all()


def test_a_block_without_gradient_decays_by_beta_and_its_bytes_stay() -> None:
    piece = with_moments(make_piece(256 * 40, seed=1), torch.uint8)
    piece = piece._replace(grad=torch.zeros_like(piece.grad))
    piece.exp_avg_scale[0] = piece.exp_avg_sq_scale[0] = 0.0  # type: ignore[index]
    piece.exp_avg[:256] = piece.exp_avg_sq[:256] = 0
    weight = piece.weight.clone()
    before = copy_of(piece)
    for step in range(1, 20):
        reference.update([piece], adam_scalars(step=step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0))
        assert torch.equal(piece.exp_avg, before.exp_avg) and torch.equal(piece.exp_avg_sq, before.exp_avg_sq)
    assert before.exp_avg_scale is not None and (before.exp_avg_scale < 0).any()
    torch.testing.assert_close(piece.exp_avg_scale, before.exp_avg_scale * 0.9**19, rtol=1e-5, atol=0.0)
    assert torch.equal(piece.weight[:256], weight[:256])


def test_bf16_moments_round_to_nearest_even() -> None:
    values = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001], dtype=torch.int32).view(
        torch.float32
    )
    out = torch.empty(5, dtype=torch.bfloat16)
    reference.to_bfloat16_even_(out, values)
    assert out.view(torch.int16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0]


@pytest.mark.skipif(not LEVELS, reason="gemini was installed without its CPU kernels")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["random", "special", "bits"])
@pytest.mark.parametrize("grad", GRADS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("moments", SMALL, ids=str)
def test_every_kernel_gives_the_bits_of_the_reference(
    moments: torch.dtype, layout: str, grad: torch.dtype, kind: str, level: str
) -> None:
    def kernel(pieces: list[AdamPiece], scalars: Any) -> None:
        cpu_adam.update(pieces, scalars, level=level, num_threads=3)

    for numel in (1, 255, 256, 257, 70_001):
        piece = with_moments(make_piece(numel, layout, grad, kind, seed=numel), moments)
        for options in ({}, {"clip": 0.3, "inv_scale": 2.0**-16}, {"adamw_mode": False}, {"weight_decay": 0.0}):
            expected = updated(reference.update, piece, **options)
            assert differing(updated(kernel, piece, numel % 4, **options), expected) == []


@pytest.mark.skipif(not LEVELS, reason="gemini was installed without its CPU kernels")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_pieces_of_all_formats_in_one_call(num_threads: int) -> None:
    sizes = [5, 40_001, 1, 32_768, 70_001, 3]
    pieces = [with_moments(make_piece(n, seed=n), [*SMALL, torch.float32][i % 3]) for i, n in enumerate(sizes)]
    ours, theirs = [copy_of(each) for each in pieces], [copy_of(each) for each in pieces]
    scalars = adam_scalars(step=3, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    cpu_adam.update(ours, scalars, num_threads=num_threads)
    reference.update(theirs, scalars)
    assert [differing(a, b) for a, b in zip(ours, theirs)] == [[]] * len(sizes)


@pytest.mark.skipif(not LEVELS, reason="gemini was installed without its CPU kernels")
@pytest.mark.parametrize("kind", ["random", "special", "bits"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kernel_rounds_with_the_random_numbers_of_the_reference(layout: str, kind: str, level: str) -> None:
    def kernel(pieces: list[AdamPiece], scalars: Any) -> None:
        cpu_adam.update(pieces, scalars, level=level, num_threads=3)

    for numel, first, step in ((1, 0, 1), (257, 2**32 - 100, 2), (70_001, 2**33 + 512, 10**6)):
        draws = Draws(reference.key_of_draws(7, step), first)
        for spans in (None, Spans([(0, 1), (numel // 2, numel // 3)])):
            piece = with_moments(make_piece(numel, layout, kind=kind, seed=numel), torch.bfloat16)
            piece = piece._replace(draws=draws, spans=spans)
            assert differing(updated(kernel, piece), updated(reference.update, piece)) == []


def test_stochastic_rounding_has_the_mean_of_what_it_rounds_and_keeps_what_needs_none() -> None:
    values = torch.tensor([1.0 + 1e-3, -2.0 - 5e-3, 3.0, 0.0, -0.0, 1e-40, math.inf, -math.inf, math.nan])
    total = torch.zeros(len(values), 400, dtype=torch.float64)
    for step in range(100):
        drawn = reference.draws_of(Draws(reference.key_of_draws(0, step), 0), 400, torch.device("cpu"))
        for half in (drawn & 0xFFFF, drawn >> 16):
            out = torch.empty(len(values), 400, dtype=torch.bfloat16)
            wide = values.repeat_interleave(400)
            reference.to_bfloat16_drawn_(out.view(-1), wide, half.repeat(len(values)))
            assert out[2:5].float().eq(values[2:5, None]).all()
            assert out[6:8].float().eq(values[6:8, None]).all() and (out[8].view(torch.int16) == 0x7FC0).all()
            assert out[4].signbit().all()
            total += out.double()
    # 80,000 numbers, of which each is wrong by less than 2**-7 of its value.
    assert ((total.mean(1) / 200 - values.double())[:2].abs() < 1e-4 * values[:2].abs()).all()
    assert abs(float(total[5].mean()) / 200 / 1e-40 - 1) < 0.02


def test_random_numbers_differ_by_seed_step_place_and_moment() -> None:
    def bits(seed: int, step: int, first: int = 0) -> Tensor:
        drawn = reference.draws_of(Draws(reference.key_of_draws(seed, step), first), 4096, torch.device("cpu"))
        return (drawn[:, None] >> torch.arange(32)) & 1

    base = bits(0, 1)
    assert torch.equal(bits(0, 1, 100)[:-100], base[100:])
    # Of 131,072 bits each is set half of the time, whatever another one is: five standard deviations.
    for other in (
        bits(0, 2),
        bits(1, 1),
        bits(1, 0),
        bits(0, 1, 1),
        bits(0, 1, 2**31),
        base.roll(16, 1),
        base.roll(1, 1),
    ):
        assert abs(float((other ^ base).double().mean()) - 0.5) < 0.007
        assert abs(float(other.double().mean()) - 0.5) < 0.007


def test_a_second_moment_moves_with_stochastic_rounding_where_the_nearest_number_stands_still() -> None:
    ends = {}
    for kind in (torch.float32, torch.bfloat16, "bf16_stochastic"):
        weight = torch.nn.Parameter(torch.zeros(8192))
        optimizer = HybridAdam([weight], lr=1e-3, state_dtype=kind)
        for step in range(400):
            weight.grad = torch.full_like(weight, 1.0 if step < 10 else 0.5)
            optimizer.step()
        ends[kind] = float(optimizer.state_dict()["state"][0]["exp_avg_sq"].mean())
    assert ends["bf16_stochastic"] == pytest.approx(ends[torch.float32], rel=2e-3)
    assert ends[torch.bfloat16] != pytest.approx(ends[torch.float32], rel=2e-2)


def test_a_piece_of_8_bit_moments_is_cut_between_blocks_only() -> None:
    piece = with_moments(make_piece(1000), torch.uint8)
    piece.check()
    with pytest.raises(ValueError, match="cut at multiples of 256"):
        piece.narrow(100, 300)
    with pytest.raises(ValueError, match="exp_avg_scale must be given with uint8 moments"):
        piece._replace(exp_avg_scale=None).check()
    with pytest.raises(ValueError, match="must match weight"):
        piece._replace(exp_avg_scale=torch.zeros(3)).check()
