"""Activation checkpointing in all of torch's ways: the bits of plain PyTorch with the same checkpointing."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gemini import ShardedModel, ShardedOptimizer, SlotError
from tests.checkpointed import SELECTIVE, WAYS, Net, keeping, loss_of, train
from tests.harness.live_storages import LiveStorages
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import assert_same, build, inputs, plain, sharded, weights_of, wrap

PLACES = ["cuda", "smallest"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpointed_model_has_the_bits_of_the_plain_one(way: str, place: str) -> None:
    make = partial(Net, way)
    both = sharded(place, make=make), plain(make=make)
    for model, optimizer in both:
        train(model, optimizer)
    assert_same(*(weights_of(model) for model, _ in both))
    assert place == "cuda" or both[0][0].observer.counts["evict"] > 0


@pytest.mark.parametrize("place", PLACES)
def test_modules_may_be_checkpointed_after_wrapping(place: str) -> None:
    both = sharded(place, make=partial(Net, "none")), plain(make=partial(Net, "none"))
    for model, optimizer in both:
        getattr(model, "module", model).checkpoint_blocks()
        train(model, optimizer)
    assert_same(*(weights_of(model) for model, _ in both))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", SELECTIVE)
def test_the_whole_wrapped_model_may_be_checkpointed(way: str, place: str) -> None:
    both = sharded(place, make=partial(Net, "none")), plain(make=partial(Net, "none"))
    for model, optimizer in both:
        around = partial(checkpoint, model, use_reentrant=False, context_fn=keeping(SELECTIVE[way]))
        train(around, optimizer)
    assert_same(*(weights_of(model) for model, _ in both))


@pytest.mark.parametrize("way", ["own parameters", "composable", "keep products"])
def test_under_autocast_a_checkpointed_model_has_the_bits_of_the_plain_one(way: str) -> None:
    make = partial(Net, way)
    both = sharded("smallest", make=make), plain(make=make)
    for model, optimizer in both:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
    assert_same(*(weights_of(model) for model, _ in both))


@pytest.mark.parametrize("way", ["own parameters", "composable"])
def test_nothing_of_a_recomputation_stays(way: str) -> None:
    """Copies of weights that a recomputation keeps for backward go when backward has read them."""
    model = wrap("smallest", partial(Net, way))
    with LiveStorages() as live:
        alive = []
        for step in range(6):
            loss_of(model, step).backward()
            model.zero_grad()
            alive.append(live.bytes_now)
    assert alive[2:] == alive[2:3] * 4, alive


def test_a_weight_that_was_modified_after_it_was_checkpointed_is_recomputed_from_as_in_plain_pytorch() -> None:
    grads = []
    for model in (build(partial(Net, "own parameters")), wrap("smallest", partial(Net, "own parameters"))):
        loss = loss_of(model)
        with torch.no_grad():
            getattr(model, "module", model).blocks[0].scale.mul_(1.5)
        loss.backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert_same(*grads)


def test_a_policy_that_keeps_views_of_weights_is_told_when_there_is_no_slot_for_them() -> None:
    make = partial(Net, "none")
    context = keeping((torch.ops.aten.t.default,))
    model, optimizer = sharded("cuda", make=make)
    train(partial(checkpoint, model, use_reentrant=False, context_fn=context), optimizer, 1)
    with pytest.raises(SlotError, match="a view of one of its parameters is still alive"):
        checkpoint(wrap("smallest", make), inputs(0), use_reentrant=False, context_fn=context)


def trained(rank: int, way: str, **wrap: Any) -> dict[str, torch.Tensor]:
    make = partial(Net, way)
    model = ShardedModel(build(make), **mlp.placed(make, **wrap))
    train(model, ShardedOptimizer(model, mlp.adam(model.parameters())), 3, rank)
    weights = weights_of(model)
    model.close()
    return weights


@pytest.mark.sampled(2)
@on_ranks(2)
@pytest.mark.parametrize("budget", ["smallest", None])
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpointing_does_not_change_what_ranks_train(
    rank: int, world_size: int, stage: int, budget: str | None
) -> None:
    """Gradients are equal, and their order over ranks is: so are the weights after three steps."""
    wrap: dict[str, Any] = {"stage": stage, "model_data_memory": budget}
    wanted = trained(rank, "none", **wrap)
    for way in WAYS:
        try:
            assert_same(trained(rank, way, **wrap), wanted)
        except AssertionError as error:
            raise AssertionError(f"{way}: {error}") from error
