"""`ignore_unused_parameters=False`: what no rank has a gradient of is named, and nothing changes."""

from typing import Any

import pytest
import torch

from gemini import GeminiError, state_hash
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import weights_of
from tests.zoo.parts import Pair, Sometimes, at_some_places


@pytest.mark.sampled(2)
@at_some_places
def test_what_no_rank_has_a_gradient_of_is_named_before_anything_changes(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """ignore_unused_parameters=False names what no rank has a gradient of, before anything changes."""
    pair = Pair(rank, world_size, {**wrap, "ignore_unused_parameters": False}, Sometimes)
    its = pair.model.module
    pair.steps(0)
    before = state_hash(pair.model, pair.optimizer)
    for uses in ((), (0,)):
        its.uses = pair.plain.uses = uses
        pair.backward(1)
        named = r"layers\.2\.weight, layers\.2\.bias" + (r":" if uses else r", layers\.3\.weight, layers\.3\.bias:")
        with pytest.raises(GeminiError, match=f"no rank has a gradient of {named}"):
            pair.optimizer.step()
        pair.zero_grad()
        assert state_hash(pair.model, pair.optimizer) == before
    pair.flag(False, "layers.2.")
    pair.steps(2)
    pair.flag(True, "layers.2.")
    its.uses = pair.plain.uses = (0,)
    pair.backward(3)
    its.uses = pair.plain.uses = (0, 1)
    pair.backward(4)  # one micro-batch of the step is enough
    pair.optimizer.step()
    pair.model.close()


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_a_parameter_that_one_rank_uses_is_used(rank: int, world_size: int, stage: int) -> None:
    """What one rank has a gradient of is used."""
    pair = Pair(rank, world_size, {"stage": stage, "ignore_unused_parameters": False}, Sometimes)
    pair.model.module.uses = (0, 1) if rank == world_size - 1 else ()
    before = weights_of(pair.model)
    pair.loss(pair.model, 0, rank).backward()
    pair.optimizer.step()
    after = weights_of(pair.model)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    pair.model.close()
