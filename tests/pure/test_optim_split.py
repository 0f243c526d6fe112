"""A master in two halves is exact."""

import pytest
import torch
from torch import Tensor

from optim import join_master_, split_master_, to_bfloat16_half_up
from tests.pure.kernels import SPECIAL, values


def round_trip(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_master_(weight, remainder, master)
    joined = torch.empty_like(master)
    join_master_(joined, weight, remainder)
    return weight, remainder, joined


def check(master: Tensor) -> None:
    weight, remainder, joined = round_trip(master)
    nan = master.isnan()
    assert torch.equal(joined.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert torch.equal(weight.view(torch.int16), to_bfloat16_half_up(master).view(torch.int16))
    assert joined[nan].isnan().all()
    assert not remainder[nan].any()


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 100_003])
@pytest.mark.parametrize("kind", ["random", "special", "bits"])
def test_every_value_comes_back(kind: str, numel: int) -> None:
    check(values(numel, kind, torch.Generator().manual_seed(numel)))


def test_special_values_and_the_borders_of_rounding() -> None:
    edges = torch.tensor([0x7FFF, 0x8000, 0x8001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x00800000], dtype=torch.int32)
    check(torch.cat([torch.tensor(SPECIAL), edges.view(torch.float32), -edges.view(torch.float32)]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sign_and_exponent", [0, 1, 127, 254, 255, 256 + 127, 511])
def test_all_mantissas_of_some_exponents(sign_and_exponent: int) -> None:
    bits = torch.arange(2**23, dtype=torch.int64) + (sign_and_exponent << 23)
    check(bits.to(torch.int32).view(torch.float32))


@pytest.mark.soak
def test_all_values() -> None:
    for sign_and_exponent in range(512):
        bits = torch.arange(2**23, dtype=torch.int64) + (sign_and_exponent << 23)
        check(bits.to(torch.int32).view(torch.float32))


def test_a_weight_that_was_zeroed_is_zero() -> None:
    master = torch.full((6,), 0.1) + torch.arange(6) * 1e-4
    weight, remainder, _ = round_trip(master)
    assert (remainder < 0).any()
    weight[::2] = torch.tensor([0.0, -0.0, 0.0])
    joined = torch.empty(6)
    join_master_(joined, weight, remainder)
    assert bool((joined[::2].abs() < 1e-40).all())
    assert torch.equal(joined[1::2], master[1::2])


def test_tensors_that_do_not_fit_are_named() -> None:
    master = torch.zeros(4)
    weight, remainder = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"weight must be torch\.bfloat16"):
        split_master_(master, remainder, master)
    with pytest.raises(ValueError, match=r"remainder must be torch\.int16"):
        join_master_(master, weight, remainder[:3])
