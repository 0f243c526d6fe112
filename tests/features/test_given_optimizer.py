"""The optimizer that a script made and wrapped: its hooks run, and its own methods act on the sharded one."""

import copy
from typing import Any

import pytest
import torch

import gemini
from gemini import GeminiError, ShardedOptimizer, UnsupportedError
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import assert_same, assert_same_models, build, loss_of, plain, train_step, weights_of, wrap

MAKES: dict[str, Any] = {
    "hybrid": lambda parameters: HybridAdam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, foreach=False),  # begins with states
}
PLACES = ("cuda", "cpu", "smallest")


@on_ranks(1, 2)
@pytest.mark.parametrize("make", ["hybrid", "adamw"])
def test_hooks_from_before_the_wrapping_run_and_can_be_removed(rank: int, world_size: int, make: str) -> None:
    model, calls = wrap("smallest"), []
    given = MAKES[make](model.parameters())

    def zero_first(optimizer: Any, *_: Any) -> None:
        """A hook that edits: it has the optimizer that steps."""
        calls.append("pre")
        optimizer.param_groups[0]["params"][0].grad.zero_()

    handle = given.register_step_pre_hook(zero_first)
    given.register_step_post_hook(lambda optimizer, *_: calls.append(type(optimizer).__name__))
    given.register_state_dict_post_hook(lambda _, state: {**state, "of the hook": 1})
    given.register_load_state_dict_pre_hook(lambda _, state: calls.append("load"))
    optimizer = ShardedOptimizer(model, given)
    plain_model = build()
    its = MAKES[make](plain_model.parameters())
    for step in range(3):
        if step == 2:
            handle.remove()
            given.register_step_pre_hook(lambda *_: calls.append("late"))
        train_step(model, optimizer, step)
        loss_of(plain_model, step).backward()
        if step < 2:
            its.param_groups[0]["params"][0].grad.zero_()
        its.step()
        its.zero_grad()
    assert calls == ["pre", "ShardedOptimizer"] * 2 + ["late", "ShardedOptimizer"]
    assert_same(weights_of(model), weights_of(plain_model))
    saved = optimizer.state_dict()
    assert saved.pop("of the hook") == 1
    optimizer.load_state_dict(saved)
    assert calls[-1] == "load"


@on_ranks(1, 2)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("place", PLACES)
def test_the_given_optimizer_steps_saves_and_loads_as_before(rank: int, world_size: int, place: str, make: str) -> None:
    """A script that keeps the variable of the optimizer that it made trains on, instead of changing nothing."""
    model, plain_model = wrap(place), build()
    given, its = MAKES[make](model.parameters()), MAKES[make](plain_model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(given, 1)  # it wraps the `step` that it finds
    optimizer = ShardedOptimizer(model, given)
    torch.optim.lr_scheduler.StepLR(given, 1)
    for step in range(2):
        train_step(model, given, step)
        train_step(plain_model, its, step)
    loss_of(model, 7).backward()
    given.zero_grad()
    assert all(each.grad is None for each in model.parameters())
    saved, wanted = given.state_dict(), its.state_dict()["state"]
    for number, entry in wanted.items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(saved["state"][number][name]), torch.as_tensor(value)), name
    train_step(model, given, 2)
    given.load_state_dict(saved)
    assert gemini.state_hash(model, given) == gemini.state_hash(model, optimizer)
    train_step(model, given, 3)
    its.load_state_dict(its.state_dict())
    assert optimizer.last_step is not None and optimizer.last_step.number == 4
    assert isinstance(given, type(its)) and type(given).__name__ == type(its).__name__
    assert schedule.optimizer is given and given.param_groups is optimizer.param_groups
    assert len(given.state) == len(optimizer.state) == len(list(model.parameters()))


@on_ranks(1, 2)
def test_hooks_run_in_an_engine(rank: int, world_size: int) -> None:
    module, calls = build(), []
    given = torch.optim.AdamW(module.parameters(), lr=1e-2)
    given.register_step_pre_hook(lambda *_: calls.append("pre"))
    given.register_step_post_hook(lambda *_: calls.append("post"))
    engine, *_ = gemini.initialize(module, given, config={"device": "emulated"}, verbose=False)
    for step in range(2):
        engine.backward(loss_of(engine, step))
        engine.step()
    assert calls == ["pre", "post"] * 2


def test_an_optimizer_is_given_once_and_cannot_be_copied() -> None:
    model = wrap("cuda")
    given = HybridAdam(model.parameters(), lr=1e-2)
    optimizer = ShardedOptimizer(model, given)
    with pytest.raises(UnsupportedError, match="a ShardedOptimizer was made of this HybridAdam"):
        ShardedOptimizer(wrap("cuda"), given)
    with pytest.raises(UnsupportedError, match=r"cannot be pickled or copied.*state_dict"):
        copy.deepcopy(given)
    optimizer.close()
    with pytest.raises(GeminiError, match=r"step\(\) of a HybridAdam whose ShardedOptimizer was closed"):
        given.step()
    # It may be given again, and begins from fresh states.
    reference, its = plain()
    again = HybridAdam(reference.parameters(), lr=1e-2)
    its = ShardedOptimizer(model, given)
    for step in range(2):
        train_step(model, its, step)
        train_step(reference, again, step)
    assert_same_models([(model, its), (reference, again)])
