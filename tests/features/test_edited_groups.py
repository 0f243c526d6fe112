"""`param_groups` that a script edits in place: what it shows counts from the next step on, as in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemini import DivergenceError, GeminiError, RemoteRankError, ShardedModel, ShardedOptimizer, state_hash
from optim import HybridAdam
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import PLACES, assert_same, build, loss_of, placed, weights_of


def move(optimizer: Any) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))


def take_out_and_put_back(optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    if len(params) % 2:
        params.append(optimizer.taken)
    else:
        optimizer.taken = params.pop()


def empty(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = []


def remove(optimizer: Any) -> None:
    if len(optimizer.param_groups) > 1:
        del optimizer.param_groups[0]


def replace(optimizer: Any) -> None:
    optimizer.param_groups = [dict(group, lr=0.03 * number) for number, group in enumerate(optimizer.param_groups)]


def insert(optimizer: Any) -> None:
    """A group in front, which shifts the numbers of all others."""
    first = optimizer.param_groups[0]
    optimizer.param_groups.insert(0, {**first, "params": first["params"][:1], "lr": 0.2})
    first["params"] = first["params"][1:]


EDITS: dict[str, Callable[[Any], None]] = {
    each.__name__: each for each in (move, take_out_and_put_back, empty, remove, replace, insert)
}
MAKES: dict[str, Any] = {
    "hybrid": lambda groups: HybridAdam(groups, lr=1e-2, weight_decay=0.01),
    # The second group has a state that the first one lacks.
    "sgd": lambda groups: torch.optim.SGD([groups[0], {**groups[1], "momentum": 0.9}], lr=1e-2, foreach=False),
}


def groups_of(model: Any) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:6], "lr": 1e-3}, {"params": params[6:], "lr": 1e-1}]


def both(make: str, **wrap: Any) -> list[tuple[Any, Any]]:
    model, plain = ShardedModel(build(), **placed(**wrap)), build()
    return [(model, ShardedOptimizer(model, MAKES[make](groups_of(model)))), (plain, MAKES[make](groups_of(plain)))]


@on_ranks(1, 2)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_groups_that_are_edited_in_place_train_as_in_plain_pytorch(
    rank: int, world_size: int, place: str, edit: str, make: str
) -> None:
    pair = both(make, **PLACES[place], deferred_update=True)
    for model, optimizer in pair:
        for step in range(6):
            if step in (2, 4):
                EDITS[edit](optimizer)  # before a backward
                optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == 3:
                EDITS[edit](optimizer)  # and before its step
            optimizer.step()
            optimizer.zero_grad()
    (model, optimizer), (plain, its) = pair
    assert_same(weights_of(model), weights_of(plain))
    saved = optimizer.state_dict()
    assert [len(group["params"]) for group in saved["param_groups"]] == [len(g["params"]) for g in its.param_groups]
    optimizer.load_state_dict(saved)
    assert len(set(gathered(state_hash(model, optimizer)))) == 1


@on_ranks(2)
def test_groups_that_one_rank_edits_are_refused_and_nothing_has_changed(rank: int, world_size: int) -> None:
    (model, optimizer), (plain, its) = both("hybrid")
    for step in range(3):
        loss_of(model, step).backward()
        if step == 2 and rank:
            move(optimizer)
        if step < 2:
            optimizer.step()
            loss_of(plain, step).backward()
            its.step()
            its.zero_grad()
    with pytest.raises((DivergenceError, RemoteRankError)):
        optimizer.step()
    if rank:
        optimizer.param_groups[0]["params"].insert(0, optimizer.param_groups[1]["params"].pop())
    for each, steps in ((model, optimizer), (plain, its)):
        steps.zero_grad()
        loss_of(each, 5).backward()
        steps.step()
    assert_same(weights_of(model), weights_of(plain))


def test_a_parameter_in_two_groups_or_of_another_model_is_refused_by_name() -> None:
    (model, optimizer), _ = both("hybrid")
    first, second = (group["params"] for group in optimizer.param_groups)
    for add, complaint in ((first[0], r"is in param groups 0 and 1"), (torch.nn.Parameter(torch.ones(2)), "not this")):
        second.append(add)
        loss_of(model).backward()
        before = weights_of(model)
        with pytest.raises(ValueError, match=complaint):
            optimizer.step()
        second.pop()
        assert_same(weights_of(model), before)
        optimizer.step()


@on_ranks(1, 2)
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_with_updates_in_the_backward_edits_are_followed_by_a_call(rank: int, world_size: int, place: str) -> None:
    """A backward updates before there is a step, so it refuses what it would otherwise not see."""
    pair = both("hybrid", **PLACES[place], update_in_backward=True)
    for model, optimizer in pair:
        is_sharded = isinstance(optimizer, ShardedOptimizer)
        for step in range(4):
            if step == 2:
                move(optimizer)
                if is_sharded:
                    optimizer.follow_param_groups()
            loss_of(model, step).backward()
            if step == 3 and is_sharded:
                move(optimizer)
                with pytest.raises(GeminiError, match=r"edited between backward\(\) and step\(\)"):
                    optimizer.step()
                optimizer.param_groups[0]["params"].insert(0, optimizer.param_groups[1]["params"].pop())
            optimizer.step()
            optimizer.zero_grad()
    assert_same(weights_of(pair[0][0]), weights_of(pair[1][0]))
    move(pair[0][1])
    with pytest.raises((GeminiError, RemoteRankError), match=r"follow_param_groups\(\) after the edit"):
        loss_of(pair[0][0]).backward()
