"""What users do in any order: weights, gradients and losses keep the bits of plain PyTorch."""

import random

import pytest

import tests.zoo.walk_edits
import tests.zoo.walk_operations  # noqa: F401 both fill OPERATIONS
from tests.harness.on_ranks import on_ranks_with
from tests.zoo.walks import Walk

FEW, MANY = range(5), range(5, 400)


@pytest.mark.filterwarnings("ignore:a backward ended with an exception", "ignore:a forward ended with an exception")
@on_ranks_with("seed", {1: FEW, 2: FEW[1:2]}, soak={1: MANY, 2: MANY[:100], 4: MANY[:20]}, timeout_s=120.0)
def test_a_random_walk_keeps_the_bits_of_the_plain_model(rank: int, world_size: int, seed: int) -> None:
    walk = Walk(random.Random(seed), world_size)
    try:
        walk.walk(40)
    except BaseException as error:
        error.add_note(f"{walk.options}, {walk.name}: {', '.join(walk.done)}")
        raise
