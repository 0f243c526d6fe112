"""Random walks (tests/zoo/walks.py) on the device: plain PyTorch's bits there, or those of any placement."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tests.zoo.engine_walk_operations
import tests.zoo.walk_edits
import tests.zoo.walk_operations
import tests.zoo.walk_tools  # noqa: F401 they add operations
from optim import HybridAdam
from tests.zoo.drawn import go
from tests.zoo.engine_walks import EngineWalk
from tests.zoo.placement_walks import PlacementWalk
from tests.zoo.walks import Walk

# Of torch's, these round alike on the CPU and on a GPU, so that the place of the states decides no bit.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, foreach=False),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, foreach=False),
    "hybrid": lambda groups: HybridAdam(groups, lr=1e-2, weight_decay=0.1),
}


class OfModels(Walk):
    optimizers = OPTIMIZERS


class OfHalves(PlacementWalk):
    optimizers = OPTIMIZERS


class OfEngines(EngineWalk):
    optimizers = OPTIMIZERS


WALKS: dict[str, Callable[[random.Random, torch.device], Walk | EngineWalk]] = {
    "model": lambda chance, device: OfModels(chance, 1, device),
    "16-bits": lambda chance, device: OfHalves(chance, 1, 0, device),
    "engine": lambda chance, device: OfEngines(chance, 1, device),
}


@pytest.mark.filterwarnings(
    "ignore:a backward ended with an exception",
    "ignore:a forward ended with an exception",
    "ignore:step .* was skipped on all ranks",
)
@pytest.mark.sampled(30)
@pytest.mark.parametrize("kind", WALKS)
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_a_random_walk_keeps_the_bits(seed: int, kind: str, device: torch.device) -> None:
    if kind == "engine":
        pytest.importorskip("pydantic", reason="configs are read by pydantic, which --no-deps has not installed")
    go(WALKS[kind](random.Random(seed), device), 40)
