"""More operations of random walks: param groups, states and averages between the phases. See `walks.py`."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from gemini import ShardedOptimizer, clip_grad_norm_, safe_set_full_optimizer_state
from tests.zoo.feature_walks import FeatureWalk, Together
from tests.zoo.walk_operations import Stopped
from tests.zoo.walks import Walk, batch_for, loss_of, of, operation, zero_both


def _groups_of(walk: Walk, name: str) -> list[int]:
    """The groups that a parameter could be in, that of its optimizer, and the one that it is in, last."""
    at = [i for i, group in enumerate(walk.its.param_groups) if any(p is of(walk.plain, name) for p in group["params"])]
    return at


@operation()
def move_a_parameter(walk: Walk) -> None:
    """To another group of its optimizer, with its states."""
    (name,) = walk.names()
    (at,) = _groups_of(walk, name) or (None,)
    if at is None:
        return
    whose = [group.get("optimizer") for group in walk.optimizer.param_groups]
    others = [i for i, each in enumerate(whose) if each == whose[at] and i != at]
    if not others:
        return
    to, walk.saved = walk.chance.choice(others), None

    def do(model: Any, optimizer: Any) -> None:
        parameter, groups = of(model, name), optimizer.param_groups
        groups[at]["params"] = [each for each in groups[at]["params"] if each is not parameter]
        groups[to]["params"].append(parameter)

    walk.both(do)


@operation()
def take_a_parameter_out_for_a_step(walk: Walk) -> None:
    (name,) = walk.names()
    (at,) = _groups_of(walk, name) or (None,)
    if at is None or len(walk.its.param_groups[at]["params"]) == 1:
        return
    number, walk.saved = walk.number(), None

    def do(model: Any, optimizer: Any) -> None:
        parameter, group = of(model, name), optimizer.param_groups[at]
        group["params"] = [each for each in group["params"] if each is not parameter]
        walk.scale(optimizer, loss_of(model, number)).backward()
        optimizer.step()
        model.zero_grad()
        group["params"].append(parameter)

    walk.both(do)


@operation()
def change_other_settings(walk: Walk) -> None:
    place, beta, momentum = walk.number() % 2, walk.chance.choice([0.5, 0.8]), walk.chance.choice([0.5, 0.9])

    def do(model: Any, optimizer: Any) -> None:
        group = optimizer.param_groups[place]
        if "betas" in group:
            group["betas"] = (beta, 0.9)
        if group.get("momentum"):
            group["momentum"] = momentum
        if "eps" in group:
            group["eps"] = (None, 1e-2) if isinstance(group["eps"], tuple) else 1e-7

    walk.both(do)


def _whole_states(walk: Walk, name: str) -> dict[str, Tensor]:
    entry = walk.its.state.get(of(walk.plain, name), {})
    return {
        key: value
        for key, value in entry.items()
        if isinstance(value, Tensor) and value.shape == of(walk.plain, name).shape and value.dim() and key != "ema"
    }


@operation()
def edit_a_state(walk: Walk) -> None:
    (name,) = walk.names(trained=True) or (None,)
    if name is None:
        return
    states = _whole_states(walk, name)
    if not states or any(value.dtype is not torch.float32 for value in states.values()):
        return
    key, how = walk.chance.choice(sorted(states)), walk.chance.randrange(3)

    def do(model: Any, optimizer: Any) -> None:
        parameter = of(model, name)
        if how == 0:
            optimizer.state[parameter][key].mul_(0.5)
        elif how == 1 and isinstance(optimizer, ShardedOptimizer):
            safe_set_full_optimizer_state(parameter, states[key] * 2, key)
        elif how == 1:
            optimizer.state[parameter][key] *= 2
        else:
            for each in getattr(optimizer, "optimizers", [optimizer]):
                each.state.pop(parameter, None)

    walk.both(do)


@operation()
def clip_by_norm_and_step(walk: Walk) -> None:
    if not any(parameter.grad is not None for parameter in walk.plain.parameters()) or walk.optimizer.loss_scale != 1:
        return
    zero_both(walk)
    number = walk.number()
    if not isinstance(walk.its, ShardedOptimizer) and not walk.has_extra and walk.plain.uses_extra:
        return

    def do(model: Any, optimizer: Any) -> Tensor:
        walk.scale(optimizer, loss_of(model, number)).backward()
        is_ours = isinstance(optimizer, ShardedOptimizer)
        norm: Tensor = optimizer.clip_grad_norm_(0.05) if is_ours else clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        model.zero_grad()
        return norm

    if any(p.requires_grad for p in walk.plain.parameters()):
        walk.agree(do)


@operation()
def a_hook_of_the_step_raises(walk: Walk) -> None:
    def stop(*_: Any) -> None:
        raise Stopped

    def do(model: Any, optimizer: Any) -> None:
        its = optimizer.optimizers[0] if isinstance(optimizer, Together) else optimizer
        handle = its.register_step_pre_hook(stop)
        with contextlib.suppress(Stopped):
            optimizer.step()
        handle.remove()

    walk.both(do)


@operation(2)
def look_at_the_averages(walk: Walk) -> None:
    if not isinstance(walk, FeatureWalk) or not walk.has_average:
        return
    number, how, (name,) = walk.number(), walk.chance.randrange(5), walk.names()

    def block(optimizer: Any) -> Any:
        return optimizer.ema.weights() if isinstance(optimizer, ShardedOptimizer) else optimizer.weights()

    def do(model: Any, optimizer: Any) -> Tensor | None:
        found = None
        with contextlib.suppress(Stopped), block(optimizer):
            if how == 0:
                found = of(model, name).detach().clone()
            elif how == 1:
                model.eval()
                with torch.no_grad():
                    found = model(batch_for(model, number)).clone()
                model.train()
            elif how == 2:
                with torch.no_grad():
                    of(model, name).mul_(0.5)
                if not isinstance(optimizer, ShardedOptimizer) and optimizer.average:
                    optimizer.average[name].mul_(0.5)
            elif how == 3:
                raise Stopped
            else:
                found = model.state_dict()[name].clone()
        return found

    if how == 2 and not walk.its.average:
        return
    walk.agree(do)


@operation()
def another_optimizer(walk: Walk) -> None:
    """The optimizer is closed, and the model gets a new one, of a kind that may be another."""
    if not isinstance(walk, FeatureWalk):
        return
    zero_both(walk)
    walk.optimizer.close()
    walk.name = walk.chance.choice(list(walk.optimizers))
    walk.has_average = walk.chance.random() < 0.5 and walk.name not in ("8bit", "bf16")
    walk.saved, walk.has_extra, walk.has_forgotten = None, False, False
    made = [walk.optimizers[walk.name](walk._groups(model)) for model in (walk.model, walk.plain)]
    walk.optimizer, walk.its = walk.finish(walk.model, made[0]), walk.finish(walk.plain, made[1])
