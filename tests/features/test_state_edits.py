"""`optimizer.state` that a script writes to, resets or replaces: the next step sees it, as in plain PyTorch."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import GeminiError, ShardedModel, ShardedOptimizer, UnsupportedError, state_hash
from optim import HybridAdam
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import PLACES, assert_same, build, loss_of, placed, weights_of

MAKES: dict[str, Any] = {
    "hybrid": lambda parameters: HybridAdam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False),
}


def name_of(optimizer: Any) -> str:
    return "momentum_buffer" if "momentum" in optimizer.defaults else "exp_avg"


def some(model: Any) -> list[Any]:
    return list(model.parameters())[:4]


def in_place(model: Any, optimizer: Any) -> None:
    """As ReLoRA does it, through a view, a list, `.data` and a mask."""
    a, b, c, d = (optimizer.state[p][name_of(optimizer)] for p in some(model))
    a.view(-1)[::2].zero_()
    torch._foreach_mul_([b, c], 0.5)
    d.data.mul_(2.0)
    c[c > 0] = 0.0
    b += 1.0


def through_items(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.1)


def assigned(model: Any, optimizer: Any) -> None:
    for p in some(model):
        optimizer.state[p][name_of(optimizer)] = torch.full_like(p, 0.25)


def the_step(model: Any, optimizer: Any) -> None:
    for number, p in enumerate(some(model)):
        if "step" in optimizer.state[p]:
            if number % 2 and isinstance(optimizer.state[p]["step"], torch.Tensor):
                optimizer.state[p]["step"].zero_()
            else:
                is_number = isinstance(optimizer.state[p]["step"], int)
                optimizer.state[p]["step"] = 0 if is_number else torch.zeros(())


def whole_entry(model: Any, optimizer: Any) -> None:
    for p in some(model):
        optimizer.state[p] = {
            name: value.clone() * 0.5 if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in optimizer.state[p].items()
        }


def deleted(model: Any, optimizer: Any) -> None:
    a, b, c, d = some(model)
    del optimizer.state[a]
    assert optimizer.state.pop(b)
    optimizer.state[c].clear()
    optimizer.state[d] = {}


def cleared(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def replaced(model: Any, optimizer: Any) -> None:
    optimizer.state = collections.defaultdict(dict)


EDITS: dict[str, Callable[[Any, Any], None]] = {
    each.__name__: each
    for each in (in_place, through_items, assigned, the_step, whole_entry, deleted, cleared, replaced)
}


def both(make: str, **wrap: Any) -> list[tuple[Any, Any]]:
    model, plain = ShardedModel(build(), **placed(**wrap)), build()
    return [(model, ShardedOptimizer(model, MAKES[make](model.parameters()))), (plain, MAKES[make](plain.parameters()))]


def train(pair: list[tuple[Any, Any]], edit: Callable[[Any, Any], None]) -> None:
    for model, optimizer in pair:
        for step in range(5):
            loss_of(model, step).backward()
            if step == 3:
                edit(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                edit(model, optimizer)


@on_ranks(1, 2)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_states_that_a_script_edits_train_as_in_plain_pytorch(
    rank: int, world_size: int, place: str, edit: str, make: str
) -> None:
    pair = both(make, **PLACES[place], deferred_update=True)
    train(pair, EDITS[edit])
    (model, optimizer), (plain, _) = pair
    assert_same(weights_of(model), weights_of(plain))
    assert len(set(gathered(state_hash(model, optimizer)))) == 1


@on_ranks(1, 2)
@pytest.mark.parametrize("edit", ["in_place", "deleted"])
def test_states_on_the_disk_are_edited_alike(rank: int, world_size: int, edit: str, tmp_path: Path) -> None:
    pair = both("hybrid", disk_path=str(tmp_path), disk_optim_frac=1.0)
    train(pair, EDITS[edit])
    assert_same(weights_of(pair[0][0]), weights_of(pair[1][0]))
    pair[0][0].close()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_of_a_write_that_differs_by_rank_each_ranks_part_counts(rank: int, world_size: int, stage: int) -> None:
    (model, optimizer), _ = both("hybrid", stage=stage)
    loss_of(model).backward()
    optimizer.step()
    optimizer.state[next(model.parameters())]["exp_avg"].fill_(float(rank))
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
    assert len(set(gathered(state_hash(model, optimizer)))) == 1


def test_what_cannot_count_is_refused_by_name() -> None:
    (model, optimizer), _ = both("hybrid")
    first, second = some(model)[:2]
    second.requires_grad_(False)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = state_hash(model, optimizer)
    old = optimizer.state[first]["exp_avg"]
    with pytest.raises(ValueError, match="this optimizer keeps step, exp_avg, exp_avg_sq"):
        del optimizer.state[first]["exp_avg_sq"]
    with pytest.raises(ValueError, match="keeps step, exp_avg, exp_avg_sq"):
        optimizer.state[first]["momentum_buffer"] = torch.zeros_like(first)
    with pytest.raises(ValueError, match="has shape"):
        optimizer.state[first]["exp_avg"] = torch.zeros(3)
    with pytest.raises(KeyError, match="not a parameter"):
        optimizer.state[torch.zeros(2)] = {}
    with pytest.raises(UnsupportedError, match="would change the shape"):
        old.t_()
    assert state_hash(model, optimizer) == before
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(GeminiError, match=r"'exp_avg' of 'layers\.0\.weight' has changed since this tensor was read"):
        old.zero_()
    assert type(old + 1) is torch.Tensor and type(old[0]) is type(old)


def test_with_updates_in_the_backward_states_are_written_after_the_step() -> None:
    pair = both("hybrid", update_in_backward=True)
    for model, optimizer in pair:
        for step in range(4):
            loss_of(model, step).backward()
            if step == 2 and isinstance(optimizer, ShardedOptimizer):
                with pytest.raises(GeminiError, match=r"Call optimizer.step\(\) first"):
                    optimizer.state[some(model)[0]]["exp_avg"].zero_()
            optimizer.step()
            optimizer.zero_grad()
            through_items(model, optimizer)
    assert_same(weights_of(pair[0][0]), weights_of(pair[1][0]))
