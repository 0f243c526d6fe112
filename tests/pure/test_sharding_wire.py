"""Blocks of quantised values: how wrong they may be, what becomes of infinite ones, and that they need no memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharding import ALIGNMENT, ShardLayout, Unit, WireFormat, shown
from sharding.wire import decode_in_place, encode_own, encoded_part
from tests.harness.payloads import same_bits, shard_of, values

FORMATS = [WireFormat(8), WireFormat(4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bound_of(wire: WireFormat, x: Tensor) -> Tensor:
    """By element of 1-D `x`: absmax / (2 * largest) of its block, and the roundings of fp32 and of the dtype."""
    padded = torch.zeros(-(-x.numel() // ALIGNMENT) * ALIGNMENT, dtype=torch.float64)
    padded[: x.numel()] = x.double()
    absmax = padded.view(-1, ALIGNMENT).abs().amax(1, keepdim=True).expand(-1, ALIGNMENT).reshape(-1)[: x.numel()]
    rounding = torch.finfo(x.dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    return absmax / (2 * wire.largest) + rounding * absmax + torch.finfo(x.dtype).smallest_normal


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(DTYPES),
    st.integers(0, 1100),
    st.integers(0, 2**31),
    st.sampled_from([-140, -126, -30, 0, 10, 120]),
    st.booleans(),
)
def test_an_element_is_wrong_by_half_a_step_of_its_block_at_most(
    wire: WireFormat, dtype: torch.dtype, numel: int, seed: int, exponent: int, is_spiky: bool
) -> None:
    x = values(seed, numel, torch.float64) * 2.0**exponent
    if is_spiky and numel:
        x[seed % numel] *= 1000
    largest = torch.finfo(dtype).max * (1 - 1e-6 * (dtype is torch.float32))
    x = x.clamp(-largest, largest).to(dtype)
    found = shown(wire, x)
    assert found.dtype is dtype and found.shape == x.shape and torch.isfinite(found).all()
    assert ((found.double() - x.double()).abs() <= bound_of(wire, x)).all()


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_on_the_grid_arrive_exactly(wire: WireFormat, dtype: torch.dtype) -> None:
    x = torch.randint(-wire.largest, wire.largest + 1, (3 * ALIGNMENT,)).to(dtype)
    x[::ALIGNMENT] = -wire.largest
    assert torch.equal(shown(wire, x), x)
    assert torch.equal(shown(wire, torch.zeros(300, dtype=dtype)), torch.zeros(300, dtype=dtype))


def test_large_bf16_values_are_not_read_as_fp16() -> None:
    x = torch.tensor([1e30, -3e38, 2e-20], dtype=torch.bfloat16)
    for wire in FORMATS:
        assert ((shown(wire, x).double() - x.double()).abs() <= bound_of(wire, x)).all()


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_with_what_is_not_finite_stays_so_and_others_do_not(wire: WireFormat, bad: float) -> None:
    x = torch.ones(2 * ALIGNMENT)
    x[7] = bad
    found = shown(wire, x)
    assert not torch.isfinite(found[:ALIGNMENT]).any() and torch.isfinite(found[ALIGNMENT:]).all()


def test_payloads_are_a_quarter_and_an_eighth_of_fp32() -> None:
    for wire, most in zip(FORMATS, (0.27, 0.14), strict=True):
        assert wire.num_bytes(1 << 20) / (4 << 20) <= most
    assert [wire.num_bytes(1 << 20) / (4 << 20) for wire in FORMATS] == [0.25390625, 0.12890625]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("factors", [[1], [7, 0, 1, 5], [700], [3, 400]], ids=str)
def test_a_payload_is_encoded_and_decoded_in_its_own_memory(
    dtype: torch.dtype, wire: WireFormat, factors: list[int]
) -> None:
    """Of each of three ranks, with its shard in the payload already, or apart; the others' bytes are pasted in."""
    units, end = [], 0
    for factor in factors:
        units.append(Unit(end, 3 * factor * ALIGNMENT))
        end += units[-1].numel
    layout = ShardLayout(tuple(units), 3, wire=wire)
    whole = values(1, layout.numel, dtype)
    wanted = shown(wire, whole)
    payloads = []
    for rank in range(3):
        for is_apart in (False, True):
            payload = torch.full_like(whole, float("nan"))
            shard = shard_of(whole, layout, rank) if is_apart else None
            if not is_apart:
                for piece in layout.slices(rank):
                    payload[piece.in_payload] = whole[piece.in_payload]
            encode_own(payload, shard, layout, rank, encoded_part(payload, layout))
            payloads.append((rank, payload))
    places = [(rank, layout.encoded.slices(rank)) for rank in range(3)]
    sent = {
        rank: [encoded_part(payload, layout)[piece.in_payload].clone() for piece in layout.encoded.slices(rank)]
        for rank, payload in payloads
    }
    for _, payload in payloads:
        for rank, pieces in places:
            for piece, part in zip(pieces, sent[rank], strict=True):
                encoded_part(payload, layout)[piece.in_payload] = part
        decode_in_place(payload, layout)
        assert same_bits(payload, wanted)
