"""More operations of random walks: what libraries around a training do to a model. See `walks.py`.

Copies, hooks of modules, autocast, states by parameter, gradients that are zeros.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from gemini import ShardedOptimizer, safe_get_full_optimizer_state
from tests.zoo.walks import BLOCKS, Walk, assert_same, batch_for, loss_of, net_of, of, operation, zero_both


@operation()
def copy_the_model(walk: Walk) -> None:
    """As an average of weights over time does: the copy is a plain module on the host, which computes the same."""
    number = walk.number()

    def do(model: Any, _: Any) -> Tensor:
        copied = copy.deepcopy(model)
        assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
        with torch.no_grad():
            found: Tensor = copied.to(walk.device).eval()(batch_for(model, number))
        return found

    walk.agree(do)


@operation()
def hook_a_module(walk: Walk) -> None:
    """A hook that scales what a layer returns, or the gradient of what it takes, until the next call of this."""
    if walk.module_hooks:
        for handle in walk.module_hooks:
            handle.remove()
        walk.module_hooks = []
        return
    place, how = walk.chance.randrange(BLOCKS), walk.chance.randrange(4)

    def do(model: Any, _: Any) -> Any:
        layer = net_of(model).blocks[place].down
        if how == 0:
            return layer.register_forward_hook(lambda module, given, found: found * 0.5)
        if how == 1:
            return layer.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
        if how == 2:
            return layer.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
        return layer.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))

    walk.module_hooks = walk.both(do)


@operation()
def train_under_autocast(walk: Walk) -> None:
    number = walk.number()
    if any(parameter.dtype is not torch.float32 for parameter in walk.model.parameters()):
        return  # torch has no norm of weights in 16 bits for inputs in others

    def do(model: Any, optimizer: Any) -> Tensor:
        with torch.autocast(walk.device.type, dtype=torch.bfloat16):
            loss = loss_of(model, number)
        walk.scale(optimizer, loss).backward()
        return loss

    walk.agree(do)


@operation()
def zero_grad_in_place(walk: Walk) -> None:
    """Idle parameters move by their moments then, and by weight decay."""
    zero_both(walk)
    number = walk.number()

    def do(model: Any, optimizer: Any) -> None:
        walk.scale(optimizer, loss_of(model, number)).backward()
        optimizer.zero_grad(set_to_none=False)

    walk.both(do)


@operation()
def read_the_optimizers_state(walk: Walk) -> None:
    (name,) = walk.names()
    found: list[dict[str, Any]] = walk.both(lambda model, optimizer: dict(optimizer.state.get(of(model, name), {})))
    ours, its = found
    for each in found:
        each.pop("ema", None)
    assert set(ours) == set(its), (name, set(ours), set(its))
    for key, value in its.items():
        if isinstance(value, Tensor) and value.dim():
            assert_same(ours[key], value, f"{key} of {name}")
            its_parameter = of(walk.model, name)
            again = safe_get_full_optimizer_state(its_parameter, key) if value.shape == its_parameter.shape else None
            assert again is None or torch.equal(again, value), f"{key} of {name}"
        else:
            assert float(ours[key]) == float(value), f"{key} of {name}"


@operation()
def forget_the_state_of_what_is_frozen(walk: Walk) -> None:
    zero_both(walk)
    walk.has_forgotten = True

    def do(model: Any, optimizer: Any) -> None:
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.discard_state()
            return
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                for each in getattr(optimizer, "optimizers", [optimizer]):
                    each.state.pop(parameter, None)
                if name in getattr(optimizer, "average", {}):  # it is the weights from then on
                    optimizer.average[name] = parameter.detach().clone()

    walk.both(do)
