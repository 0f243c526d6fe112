"""A model with what copies may lose (ties, buffers, a recurrent layer), and copies of it on one rank or several."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.mlp import WIDTH, Mlp, adam, assert_same, build, inputs, loss_of, train_step, weights_of, wrap


class Parts(Mlp):
    """Tied weights, buffers that are saved and not, and weights that a leaf keeps in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.layers[0].weight
        self.recurrent = nn.LSTM(WIDTH, WIDTH)
        self.noted = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(super().forward(x))
        return self.recurrent(torch.tanh(self.tied(x)))[0] * self.hidden.mean()

    def note(self, *args: Any) -> None:
        self.noted += 1


def copies_are_plain(rank: int, world_size: int, arguments: dict[str, Any], place: str = "smallest") -> None:
    """A copy is equal and shares nothing; training the one does not change the other."""
    from gemini import ShardedOptimizer

    model = wrap(place, make=Parts, **arguments)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer)
    before = weights_of(model)
    copied: Any = copy.deepcopy(model)
    assert type(copied) is Parts
    assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
    assert {tensor.device.type for tensor in (*copied.parameters(), *copied.buffers())} == {"cpu"}
    assert copied.tied.weight is copied.layers[0].weight
    assert list(copied.state_dict()) == list(build(Parts).state_dict())
    assert_same(dict(copied.state_dict()), before)
    for module in copied.modules():
        own = (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks, module._backward_hooks)
        assert not any(own), "hooks of the sharded model are left in its copy"
    plain_optimizer = adam(copied.parameters())
    train_step(copied, plain_optimizer, 1)
    assert_same(weights_of(model), before)
    train_step(model, optimizer, 2)
    assert torch.equal(loss_of(copy.deepcopy(model), 3), loss_of(model, 3))
    model.close()


def copies_of_parts_are_plain(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """The module itself, modules in it, parameters, and containers of those: whole, tied as they were, on their own."""
    from gemini import ShardedOptimizer

    model = wrap(make=Parts, **arguments)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer)
    wanted = weights_of(model)
    copied: Any = copy.deepcopy(model.module)
    assert type(copied) is Parts
    assert_same(dict(copied.state_dict()), wanted)
    assert copied.tied.weight is copied.layers[0].weight
    module_too, layers, weight = copy.deepcopy([model.module, model.module.layers, model.tied.weight])
    assert module_too.layers is layers
    assert module_too.tied.weight is weight
    for path in ("layers", "layers.2", "norm", "recurrent"):
        part = copy.deepcopy(model.module.get_submodule(path))
        assert_same({f"{path}.{name}": value for name, value in part.state_dict().items()}, _of(path, wanted))
    for each in (*copied.modules(), *module_too.modules()):
        assert "__reduce_ex__" not in vars(each)
        assert not any((each._forward_hooks, each._forward_pre_hooks, each._state_dict_hooks))
    assert {(type(t), t.device.type) for t in copied.parameters()} == {(nn.Parameter, "cpu")}
    bias, data = copy.deepcopy(model.layers[1].bias), copy.deepcopy(model.layers[1].bias.detach())
    assert (type(bias), type(data), bias.requires_grad) == (nn.Parameter, Tensor, True)
    assert torch.equal(bias, wanted["layers.1.bias"])
    assert torch.equal(data, bias)
    train_step(copied, adam(copied.parameters()), 1)
    assert_same(weights_of(model), wanted)
    assert torch.equal(loss_of(module_too, 3), loss_of(model, 3))
    model.close()


def _of(path: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name.startswith(f"{path}.")}


def averages_of_parts(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """Averages of the wrapped module and of a layer are those of the model."""
    from gemini import ShardedOptimizer

    model = wrap(make=Parts, **arguments)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    average, of_module = (AveragedModel(m, use_buffers=True) for m in (model, model.module))
    of_layer = AveragedModel(model.layers[2])
    for step in range(2):
        train_step(model, optimizer, step)
        average.update_parameters(model)
        of_module.update_parameters(model.module)
        of_layer.update_parameters(model.layers[2])
    wanted = dict(average.state_dict())
    assert_same(dict(of_module.state_dict()), wanted)
    assert torch.equal(of_layer.module.weight, wanted["module.layers.2.weight"])
    model.close()


def averages(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """An average that is updated from shards is that of a plain model."""
    from gemini import ShardedOptimizer

    model = wrap(make=Parts, **arguments)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    wanted = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for step in range(3):
        train_step(model, optimizer, step)
        average.update_parameters(model)
        wanted.update_parameters(copy.deepcopy(model))
    assert_same(dict(average.state_dict()), dict(wanted.state_dict()))
    assert average(inputs(0)).shape == inputs(0).shape
    model.close()
