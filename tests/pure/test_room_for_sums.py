"""What a search may rule out without simulating a step is ruled out by the simulated step too."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import nn

from gemini import Settings, specs_of
from gemini.errors import BudgetError
from gemini.placement import host_room
from gemini.placement.needs import Packed
from gemini.placement.plan import Plan
from gemini.placement.search import find_plans
from tests.harness.on_ranks import in_soak


def plans(seed: int) -> Iterator[Plan]:
    chance = random.Random(seed)
    for _ in range(20):
        widths = [chance.choice([16, 32, 48, 64, 96]) for _ in range(chance.randint(3, 9))]
        module = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
        for parameter in list(module.parameters())[1:]:
            parameter.requires_grad_(chance.random() > 0.1)
        numel, ranks = sum(each.numel() for each in module.parameters()), chance.choice([1, 1, 2, 3])
        its = Settings(
            stage=chance.choice([1, 2, 3, 3]),
            dtype=chance.choice([torch.bfloat16, torch.float16]),
            device="cuda",
            tensor_placement_policy=chance.choice(["auto", "auto", "cpu"]),
            device_memory=int(numel * chance.uniform(4, 12)),
            host_memory=int(numel * chance.uniform(8, 30)),
        )
        try:
            found = find_plans(Packed(specs_of(module, its, ranks), its, ranks), its, None, chance.choice([2, 3]))
        except BudgetError:
            continue
        yield from filter(None, (found.trains, found.wraps))


@pytest.mark.parametrize("seed", [0, *in_soak(1, 2, 3)])
def test_sums_that_find_no_room_are_never_counted_larger_than_a_simulated_step_has_them(seed: int) -> None:
    short = [plan for plan in plans(seed) if host_room._least_bytes_of_sums(plan)]
    assert short
    for plan in short:
        assert host_room._least_bytes_of_sums(plan) <= plan.predicted_unannounced.host_peak - plan.host_bytes
