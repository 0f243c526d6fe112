"""What a script does with an engine, in any order: weights, rates and counts are those of a plain loop."""

import random

import pytest

import tests.zoo.engine_walk_operations  # noqa: F401 it adds operations
from tests.harness.on_ranks import on_ranks_with
from tests.zoo.drawn import go
from tests.zoo.engine_walks import EngineWalk

FEW, MANY = range(3), range(3, 300)


@pytest.mark.filterwarnings("ignore:a backward ended with an exception", "ignore:a forward ended with an exception")
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@on_ranks_with("seed", {1: FEW, 2: FEW[1:2]}, soak={1: MANY, 2: MANY[:80]}, timeout_s=120.0)
def test_a_random_walk_of_an_engine_is_that_of_a_plain_loop(rank: int, world_size: int, seed: int) -> None:
    go(EngineWalk(random.Random(seed), world_size), 30)
