"""What users do in any order: weights, gradients and losses keep the bits of plain PyTorch, or of any placement."""

import random

import pytest

import tests.zoo.walk_edits
import tests.zoo.walk_features
import tests.zoo.walk_operations
import tests.zoo.walk_tools  # noqa: F401 they add operations
from tests.harness.on_ranks import on_ranks_with
from tests.zoo.drawn import go
from tests.zoo.feature_walks import FeatureWalk
from tests.zoo.placement_walks import PlacementWalk
from tests.zoo.walks import Walk

FEW, MANY = range(5), range(5, 400)
ENDED = "ignore:a backward ended with an exception", "ignore:a forward ended with an exception"


@pytest.mark.filterwarnings(*ENDED)
@on_ranks_with("seed", {1: FEW, 2: FEW[1:2]}, soak={1: MANY, 2: MANY[:100], 4: MANY[:20]}, timeout_s=120.0)
def test_a_random_walk_keeps_the_bits_of_the_plain_model(rank: int, world_size: int, seed: int) -> None:
    go(Walk(random.Random(seed), world_size), 40)


@pytest.mark.filterwarnings(*ENDED, "ignore:step .* was skipped on all ranks")
@on_ranks_with("seed", {1: FEW[:3]}, soak={1: MANY, 2: MANY[:100], 4: MANY[:20]}, timeout_s=120.0)
def test_a_random_walk_of_16_bit_weights_has_the_same_bits_at_any_placement(
    rank: int, world_size: int, seed: int
) -> None:
    go(PlacementWalk(random.Random(seed), world_size, rank), 40)


@pytest.mark.filterwarnings(*ENDED)
@on_ranks_with("seed", {1: FEW, 2: FEW[1:2]}, soak={1: MANY, 2: MANY[:100], 4: MANY[:20]}, timeout_s=120.0)
def test_a_random_walk_keeps_the_bits_of_plain_optimizers_side_by_side(rank: int, world_size: int, seed: int) -> None:
    go(FeatureWalk(random.Random(seed), world_size), 40)
