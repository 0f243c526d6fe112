"""The exact norm: no order, split or rank changes a bit; nothing overflows, underflows or hides."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import optim.norm
from optim import NUM_LIMBS, TILE, accumulate_sum_of_squares_, max_abs, norm_from_limbs, zero_norm_limbs
from optim.norm import LOWEST_EXPONENT, VALUE_LIMBS, add_tile_sums_, tile_sums

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def limbs_of(*flats: Tensor) -> Tensor:
    limbs = zero_norm_limbs()
    for flat in flats:
        accumulate_sum_of_squares_(limbs, flat)
    return limbs


def norm_of(*flats: Tensor) -> float:
    return norm_from_limbs(limbs_of(*flats))


def exact_value(limbs: Tensor) -> Fraction:
    total = sum(digit << (32 * i) for i, digit in enumerate(limbs.tolist()[:VALUE_LIMBS]))
    return Fraction(total) * Fraction(2) ** LOWEST_EXPONENT


def values(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Gradients with a wide range of magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(numel, generator=generator) * 3)
    return (torch.randn(numel, generator=generator) * scale * 1e-3).to(dtype)


def tree_sum(tile: list[float], lanes: torch.dtype) -> float:
    """The written order of one tile, in scalars."""
    cells = [torch.tensor(x, dtype=lanes) for x in tile + [0.0] * (TILE - len(tile))]
    cells = [x * x for x in cells]
    while len(cells) > 1:
        half = len(cells) // 2
        cells = [cells[i] + cells[i + half] for i in range(half)]
    return float(cells[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 600])
def test_a_tile_is_summed_in_the_written_order(numel: int, dtype: torch.dtype) -> None:
    flat = values(numel, 1, dtype)
    lanes = torch.float64 if dtype == torch.float32 else torch.float32
    expected = [tree_sum(flat[i : i + TILE].float().tolist(), lanes) for i in range(0, numel, TILE)]
    assert tile_sums(flat).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_order_and_no_split_of_tiles_changes_a_limb(dtype: torch.dtype) -> None:
    flat = values(200 * TILE + 77, 2, dtype)
    whole = limbs_of(flat)
    pieces = list(flat.split(TILE))
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    assert torch.equal(limbs_of(*[pieces[i] for i in order]), whole)
    assert torch.equal(limbs_of(*flat.split(13 * TILE)), whole)
    # Ranks: each has some tiles, an integer all-reduce adds them up.
    ranks = [limbs_of(*[pieces[i] for i in order[rank::3]]) for rank in range(3)]
    assert torch.equal(ranks[2] + ranks[0] + ranks[1], whole)


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 2, 5, 512]),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    seed=st.integers(0, 10),
)
def test_any_split_on_tile_borders_and_any_block_gives_the_same_limbs(
    numel: int, dtype: torch.dtype, block: int, cuts: list[int], seed: int
) -> None:
    flat = values(numel, seed, dtype)
    whole = limbs_of(flat)
    borders = [0, *sorted(min(cut * TILE, numel) for cut in cuts), numel]
    before = optim.norm.CPU_BLOCK_NUMEL
    try:
        optim.norm.CPU_BLOCK_NUMEL = block * TILE
        assert torch.equal(limbs_of(*[flat[a:b] for a, b in itertools.pairwise(borders)]), whole)
    finally:
        optim.norm.CPU_BLOCK_NUMEL = before


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_padding_behind_a_parameter_changes_no_limb(dtype: torch.dtype) -> None:
    flat = values(1000, 3, dtype)
    assert torch.equal(limbs_of(torch.cat([flat, flat.new_zeros(1000)])), limbs_of(flat))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_the_true_norm_to_one_fp32_ulp(dtype: torch.dtype) -> None:
    for seed in range(5):
        flat = values(5000 + seed, seed, dtype)
        true = math.sqrt(math.fsum(x * x for x in flat.tolist()))
        # fp32 input: fp64 lanes, far below an fp32 ulp. Half input: 8 additions in fp32 lanes (squares are
        # exact) err by at most 8 * 2**-24 of the sum, half of that of its root: 4 half ulps in the worst
        # case, a fraction of one for errors of both signs.
        assert abs(norm_of(flat) - true) <= (2.0**-50 if dtype == torch.float32 else 2.0**-23) * true


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tile_overflows_or_underflows(magnitude: float, dtype: torch.dtype) -> None:
    # 1e-45 is the smallest denormal of fp32; bf16 has 2**-133.
    flat = torch.full((700,), magnitude).to(dtype)
    if dtype == torch.bfloat16 and magnitude == 1e-45:
        flat = torch.full((700,), 2.0**-133, dtype=dtype)
    flat[::3] *= -1
    true = math.sqrt(math.fsum(x * x for x in flat.tolist()))
    assert true > 0
    assert norm_of(flat) == pytest.approx(true, rel=4 * 2**-24, abs=0)


def test_bf16_tiles_are_redone_exactly_when_their_fp32_sum_is_outside() -> None:
    # Four values whose squares lie across the limit; in fp64 lanes nothing is rounded.
    inside, below = 2.0**-40, 2.0**-41
    for value, redone in ((inside, False), (below, True)):
        flat = torch.zeros(TILE, dtype=torch.bfloat16)
        flat[0], flat[1] = value, value * 2.0**-13
        exact = Fraction(value) ** 2 * (1 + Fraction(2) ** -26)
        assert (exact_value(limbs_of(flat)) == exact) is redone


def test_tile_sums_are_added_exactly() -> None:
    generator = torch.Generator().manual_seed(4)
    # From the smallest square, 2**-298, to the largest sum, below 2**264: every shift and every limb.
    exponents = torch.arange(-298, 264)
    sums = torch.ldexp(1 + torch.rand(562, dtype=torch.float64, generator=generator), exponents)
    sums = torch.cat([sums, sums.flip(0), torch.zeros(3, dtype=torch.float64)])
    limbs = zero_norm_limbs()
    add_tile_sums_(limbs, sums)
    assert exact_value(limbs) == sum(map(Fraction, sums.tolist()))
    assert int(limbs.max()) < sums.numel() * 2**32


def test_a_limb_grows_by_less_than_32_bits_a_tile() -> None:
    # Hence the headroom of 2**31 tiles.
    worst = torch.full((1000,), 2.0**264 * (1 - 2.0**-53), dtype=torch.float64)
    for shift in range(64):
        limbs = zero_norm_limbs()
        add_tile_sums_(limbs, worst * 2.0**-shift)
        assert int(limbs.min()) >= 0
        assert int(limbs.max()) < 1000 * 2**32


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**62), min_size=VALUE_LIMBS, max_size=VALUE_LIMBS))
def test_the_root_of_the_limbs_is_correctly_rounded(digits: list[int]) -> None:
    limbs = torch.tensor([*digits, 0, 0])
    norm = norm_from_limbs(limbs)
    below, above = Fraction(math.nextafter(norm, 0)), Fraction(math.nextafter(norm, math.inf))
    true = exact_value(limbs)
    assert ((below + Fraction(norm)) / 2) ** 2 <= true <= ((above + Fraction(norm)) / 2) ** 2


def test_a_root_just_above_a_tie_is_rounded_up() -> None:
    tie = 2**53 + 1  # between two fp64 numbers; a root of at least 65 bits does not show the 1 that is added
    square = tie * tie + 1
    digits = [(square >> (32 * i)) & 0xFFFFFFFF for i in range(VALUE_LIMBS)]
    assert norm_from_limbs(torch.tensor([*digits, 0, 0])) == math.ldexp(2**53 + 2, LOWEST_EXPONENT // 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("index", [0, 255, 256, 999, 1000])
def test_the_first_non_finite_element_is_found(dtype: torch.dtype, bad: float, index: int) -> None:
    flat = torch.ones(1001, dtype=dtype)
    limbs = zero_norm_limbs()
    assert int(accumulate_sum_of_squares_(limbs, flat)) == -1
    finite = limbs.clone()
    flat[index] = bad
    flat[1000] = bad
    found = accumulate_sum_of_squares_(limbs, flat)
    assert found.dtype == torch.int64
    assert found.dim() == 0
    assert int(found) == index
    assert limbs[-2:].sum() == (1 if index >= 768 else 2), "tiles with such elements are counted"
    norm = norm_from_limbs(limbs)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    # The other tiles are still added exactly.
    clean = torch.cat([tile for tile in flat.split(TILE) if tile.isfinite().all()])
    assert torch.equal(limbs[:-2], finite[:-2] + limbs_of(clean)[:-2])


def test_a_nan_outweighs_an_infinity() -> None:
    infinite, nan = torch.tensor([math.inf]), torch.tensor([math.nan])
    assert norm_of(infinite, torch.ones(3)) == math.inf
    assert math.isnan(norm_of(infinite, nan))
    assert math.isnan(norm_of(torch.tensor([math.inf, math.nan])))


def test_nothing_has_norm_zero() -> None:
    assert norm_of() == 0.0
    limbs = zero_norm_limbs()
    assert int(accumulate_sum_of_squares_(limbs, torch.empty(0))) == -1
    assert norm_of(torch.empty(0), torch.zeros(300), torch.zeros(300, dtype=torch.bfloat16)) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_abs_is_the_infinity_norm(dtype: torch.dtype) -> None:
    flat = torch.tensor([1.0, -3.0, 2.0], dtype=dtype)
    assert max_abs(flat).item() == 3.0
    assert max_abs(-flat).item() == 3.0
    assert max_abs(flat).dtype == torch.float32
    assert max_abs(torch.tensor([1.0, -math.inf], dtype=dtype)).item() == math.inf
    assert math.isnan(max_abs(torch.tensor([1.0, math.nan, math.inf], dtype=dtype)).item())
    assert max_abs(torch.empty(0, dtype=dtype)).item() == 0.0


@pytest.mark.parametrize("flat", [torch.ones(2, 2), torch.ones(4).int()])
def test_only_flat_tensors_of_known_dtypes_are_summed(flat: Tensor) -> None:
    with pytest.raises(ValueError, match="1-D fp64, fp32, bf16 or fp16"):
        accumulate_sum_of_squares_(zero_norm_limbs(), flat)


def test_fp64_sums_are_those_of_fp64_lanes_within_the_limbs_range() -> None:
    values = torch.tensor([3.0, 4.0, 1e-200], dtype=torch.float64)
    limbs = zero_norm_limbs()
    accumulate_sum_of_squares_(limbs, values)
    assert norm_from_limbs(limbs) == 5.0
    beyond = accumulate_sum_of_squares_(limbs, torch.tensor([1.0, 1e80], dtype=torch.float64))
    assert norm_from_limbs(limbs) == math.inf, "beyond the limbs, not wrapped around in them"
    assert int(beyond) == 0, "the first element of a tile that counts as non-finite"


def test_limbs_of_another_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="limbs"):
        accumulate_sum_of_squares_(torch.zeros(NUM_LIMBS - 1, dtype=torch.int64), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_host_reads_nothing_off_the_cpu(dtype: torch.dtype) -> None:
    # Nothing of "meta" can be read: what would wait for a GPU raises here.
    limbs = zero_norm_limbs("meta")
    first = accumulate_sum_of_squares_(limbs, torch.ones(3 * TILE + 5, dtype=dtype, device="meta"))
    assert first.shape == () and first.device.type == "meta"
