"""Half-up rounding to bf16: invertible, and infinities and NaNs stay what they are."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import optim.master
from optim import absorb_edits_, round_master_, to_bfloat16_half_up


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())


def bits16(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int16).numpy().view(np.uint16).tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_bit_pattern_rounds_half_up(patterns: list[int]) -> None:
    expected = [0x7FC0 if (b & 0x7FFFFFFF) > 0x7F800000 else ((b + 0x8000) >> 16) & 0xFFFF for b in patterns]
    assert bits16(to_bfloat16_half_up(from_bits(patterns))) == expected


def test_high_half_and_int16_remainder_give_every_master_back() -> None:
    # All mantissas of some exponents, both signs: 2**16 low halves times the high ones that carry
    # differently.
    low = torch.arange(2**16, dtype=torch.int64)
    for high in (0x0000, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x7F7E, 0x8000, 0xBF80, 0xFF7E):
        bits = ((high << 16) + low).to(torch.int32)
        hi = to_bfloat16_half_up(bits.view(torch.float32)).view(torch.int16)
        lo = bits - (hi.to(torch.int32) << 16)
        assert lo.min() >= -(2**15)
        assert lo.max() < 2**15
        assert torch.equal((hi.to(torch.int32) << 16) + lo.to(torch.int16).to(torch.int32), bits)


@pytest.mark.parametrize(
    ("master", "rounded"),
    [
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
        (0x3F808000, 0x3F81),  # a tie: nearest even would give 0x3f80
        (0xBF808000, 0xBF81),  # a tie goes away from zero
        (0x3F807FFF, 0x3F80),
        (0x7F7FFFFF, 0x7F80),  # the largest number rounds to infinity
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN that the addition alone would turn into an infinity
        (0x7FFFFFFF, 0x7FC0),  # into a negative zero
        (0xFFFFFFFF, 0x7FC0),  # into a zero
        (0x00008000, 0x0001),
        (0x00007FFF, 0x0000),
    ],
)
@pytest.mark.parametrize("neighbours", [0, 300])
def test_a_pattern_rounds_as_written(master: int, rounded: int, neighbours: int) -> None:
    values = from_bits([0x3F800000] * neighbours + [master])
    assert bits16(to_bfloat16_half_up(values)) == [0x3F80] * neighbours + [rounded]


def test_opposite_infinities_in_one_tile_stay_infinities() -> None:
    # Their sum, by which the CPU looks for a NaN, is one.
    rounded = to_bfloat16_half_up(torch.tensor([math.inf, -math.inf, 1.0]))
    assert rounded.tolist() == [math.inf, -math.inf, 1.0]


def test_shapes_tiles_and_the_given_output_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.master, "CPU_TILE_NUMEL_PER_THREAD", 7)
    master = torch.randn(3, 11)
    master[1, 4] = math.nan
    out = torch.empty(3, 11, dtype=torch.bfloat16)
    assert to_bfloat16_half_up(master, out) is out
    one_by_one = [bits16(to_bfloat16_half_up(x.reshape(1)))[0] for x in master.view(-1)]
    assert bits16(out.view(-1)) == one_by_one
    assert to_bfloat16_half_up(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    ("master", "out"),
    [
        (torch.zeros(4, dtype=torch.float64), None),
        (torch.zeros(8)[::2], None),
        (torch.zeros(4), torch.zeros(4)),
        (torch.zeros(4), torch.zeros(5, dtype=torch.bfloat16)),
    ],
)
def test_wrong_tensors_are_refused(master: torch.Tensor, out: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        to_bfloat16_half_up(master, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_takes_over_edited_elements_and_no_others(dtype: torch.dtype) -> None:
    master = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    master[5], master[6] = math.nan, math.inf
    weight = torch.empty(1000, dtype=dtype)
    round_master_(weight, master)
    before = master.clone()
    absorb_edits_(master, weight)
    assert torch.equal(before.view(torch.int32), master.view(torch.int32))
    weight[17], weight[999] = 3.0, -0.0
    absorb_edits_(master, weight)
    assert (master[17], master[999]) == (3.0, 0.0)
    assert torch.signbit(master[999])
    master[17], master[999] = before[17], before[999]
    assert torch.equal(before.view(torch.int32), master.view(torch.int32))


def test_a_changed_sign_of_zero_is_an_edit() -> None:
    master, weight = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    weight[3] = -0.0
    absorb_edits_(master, weight)
    assert torch.signbit(master).tolist() == [i == 3 for i in range(8)]
