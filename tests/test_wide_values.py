"""fp32 values in 16-bit weights: one rank."""

from typing import Any

import pytest
import torch

from tests import wide_values

WRAPS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "tensor_placement_policy": "cpu"},
    {"dtype": torch.float16, "tensor_placement_policy": "cpu", "reuse_fp16_shard": True},
]


@pytest.mark.parametrize("wrap", WRAPS, ids=str)
def test_fp32_values_reach_the_masters_unrounded(wrap: dict[str, Any]) -> None:
    wide_values.masters_are_the_values(0, 1, wrap)
