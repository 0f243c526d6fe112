"""Random programs that build a model, run once inside a `ZeroInitContext` and once without it.

What a program does next depends on its own random numbers and on names and shapes, never on values, so that both
builds are the same program. Numbers of torch are drawn equally often by both.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.drawn import Operations

SIZES = 1, 5, 16, 33
DTYPES = torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16


class Program(nn.Module):
    """A model that a random program has built."""

    def __init__(self, number: int, length: int) -> None:
        super().__init__()
        self.chance, self.done, self.count = random.Random(number), [], 0
        self.saved: dict[str, Any] = {}
        for _ in range(length):
            operation.draw(self, self.chance, self.done)

    def fresh(self) -> str:
        """A name that no part has had."""
        self.count += 1
        return f"part{self.count}"

    def pick(self, fits: Callable[[nn.Parameter], bool] = lambda parameter: True) -> nn.Parameter | None:
        """A parameter that fits. None: there is none."""
        found = [parameter for parameter in self.parameters() if fits(parameter)]
        return self.chance.choice(found) if found else None

    def child(self, *kinds: type[nn.Module]) -> str | None:
        """The name of a child of these kinds, or of any."""
        found = [name for name, child in self.named_children() if isinstance(child, kinds or nn.Module)]
        return self.chance.choice(found) if found else None

    def linear(self) -> nn.Linear:
        """A fresh layer."""
        bias = self.chance.random() < 0.7
        return nn.Linear(self.chance.choice(SIZES), self.chance.choice(SIZES), bias=bias)


operation = Operations[Program]()


@operation(4)
def add_a_linear(net: Program) -> None:
    setattr(net, net.fresh(), net.linear())


@operation(2)
def add_a_layer(net: Program) -> None:
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Embedding(7, 16, padding_idx=0),
        lambda: nn.LayerNorm(33),
        lambda: nn.Conv1d(3, 4, 3),
        lambda: nn.MultiheadAttention(16, 2),
        lambda: nn.GRU(4, 5),
        lambda: nn.BatchNorm1d(5),
        lambda: nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)),
        lambda: nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (1, 255, 257)),
        lambda: nn.Embedding.from_pretrained(torch.randn(5, 3), freeze=False),
    ]
    setattr(net, net.fresh(), net.chance.choice(makers)())


@operation(2)
def add_a_parameter(net: Program) -> None:
    makers: list[Callable[[], Tensor]] = [
        lambda: torch.tensor(1.5),
        lambda: torch.empty(0, 3),
        lambda: torch.randn(7, 11),
        lambda: torch.randn(6, 9).t(),
        lambda: torch.randn(300),
    ]
    values = net.chance.choice(makers)().to(net.chance.choice(DTYPES))
    net.register_parameter(net.fresh(), nn.Parameter(values, requires_grad=net.chance.random() < 0.8))


@operation(4)
def initialise(net: Program) -> None:
    parameter = net.pick()
    if parameter is None:
        return
    ways: list[Callable[[Tensor], Any]] = [
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.zeros_,
        lambda it: nn.init.constant_(it, 0.3),
        lambda it: nn.init.trunc_normal_(it, std=0.02),
        lambda it: it.data.normal_(),
    ]
    if parameter.dim() == 2 and parameter.numel() and parameter.dtype in (torch.float32, torch.float64):
        ways += [nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.eye_]
        ways.append(lambda it: nn.init.sparse_(it, 0.5))
    net.chance.choice(ways)(parameter)


@operation(5)
@torch.no_grad()
def edit(net: Program) -> None:
    parameter, other = net.pick(lambda it: it.numel() > 0), net.pick()
    if parameter is None or other is None:
        return

    def first_rows(to: Tensor) -> None:
        if to.dim():
            to[: to.shape[0] // 2 + 1] *= 3

    ways: list[Callable[[nn.Parameter], Any]] = [
        lambda it: it.mul_(0.5),
        lambda it: it.add_(other.double().sum().item() * 1e-3),
        lambda it: it.copy_(torch.randn(it.shape)),
        lambda it: it.sub_(it.norm()),
        lambda it: it.data.clamp_(-0.1, 0.1),
        lambda it: it.copy_(it.flip(0) if it.dim() else it * 2),
        lambda it: it.view(-1)[-1:].zero_() if it.is_contiguous() else None,
        lambda it: setattr(it, "data", it.data * 2),
        lambda it: setattr(it, "data", torch.randn(it.shape).to(it.dtype)),
        lambda it: it.detach().add_(1),
        first_rows,
        lambda it: first_rows(it.data),
    ]
    net.chance.choice(ways)(parameter)


@operation(2)
def read(net: Program) -> None:
    """What is read becomes a buffer, which the comparison sees."""
    parameter = net.pick()
    if parameter is None:
        return
    ways: list[Callable[[nn.Parameter], Tensor]] = [
        lambda it: it.detach().double().mean(),
        lambda it: it.data.clone(),
        lambda it: it.detach().clone(),
        lambda it: it.detach().norm(),
        lambda it: it.detach().flatten()[:3] * 1,
    ]
    net.register_buffer(net.fresh(), net.chance.choice(ways)(parameter))


@operation()
def tie(net: Program) -> None:
    parameter = net.pick()
    places = [
        (owner, name)
        for owner in net.modules()
        for name, other in owner.named_parameters(recurse=False)
        if parameter is not None and other is not parameter and other.shape == parameter.shape
        # a parametrization's originals, and what recurrent layers list beside their attributes, stay as they are
        if not name.startswith("original") and not isinstance(owner, nn.RNNBase)
    ]
    if places:
        owner, name = net.chance.choice(places)
        setattr(owner, name, parameter)


@operation()
def replace(net: Program) -> None:
    name = net.child()
    if name is not None:
        setattr(net, name, net.linear())


@operation()
def remove(net: Program) -> None:
    name = net.child()
    if name is not None and net.count > 3:
        delattr(net, name)


@operation()
def drop_the_bias(net: Program) -> None:
    name = net.child(nn.Linear)
    if name is not None:
        net.get_submodule(name).bias = None  # type: ignore[assignment]


@operation(2)
def copy_a_layer(net: Program) -> None:
    name = net.child()
    # Copies of a parametrized layer share its class, which is torch's own until one of them ends its parametrization.
    if name is not None and not parametrize.is_parametrized(net.get_submodule(name)):
        setattr(net, net.fresh(), copy.deepcopy(net.get_submodule(name)))


@operation()
def initialise_all(net: Program) -> None:
    def look(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            if module.bias is not None:
                module.bias.data.zero_()

    net.apply(look)


@operation()
def load_other_values(net: Program) -> None:
    name = net.child()
    if name is not None:
        child = net.get_submodule(name)
        values = {key: torch.ones(value.shape) * 0.7 for key, value in child.state_dict().items()}
        child.load_state_dict(values, assign=False)


@operation()
def save(net: Program) -> None:
    name = net.child()
    if name is not None:
        net.saved = {name: {key: value.clone() for key, value in net.get_submodule(name).state_dict().items()}}


@operation()
def load_what_was_saved(net: Program) -> None:
    for name, state in net.saved.items():
        child = dict(net.named_children()).get(name)
        if child is not None and {k: v.shape for k, v in child.state_dict().items()} == {
            k: v.shape for k, v in state.items()
        }:
            child.load_state_dict(state)


@operation()
def freeze_or_unfreeze(net: Program) -> None:
    parameter = net.pick()
    if parameter is not None:
        parameter.requires_grad_(not parameter.requires_grad)


@operation()
def cast(net: Program) -> None:
    name = net.child()
    if name is not None:
        net.get_submodule(name).to(net.chance.choice(DTYPES))


@operation(2)
@torch.no_grad()
def call(net: Program) -> None:
    name = net.child(nn.Linear)
    if name is not None:
        layer = net.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if len({parameter.dtype for parameter in layer.parameters()}) == 1:
            net.register_buffer(net.fresh(), layer(torch.ones(2, layer.in_features, dtype=layer.weight.dtype)))


@operation()
def make_a_parameter_of_another(net: Program) -> None:
    parameter = net.pick()
    if parameter is not None:
        net.register_parameter(net.fresh(), nn.Parameter(parameter.detach().clone() * 2))


@operation()
def parametrize_or_end_it(net: Program) -> None:
    name = net.child(nn.Linear)
    if name is None:
        return
    layer: Any = net.get_submodule(name)
    if parametrize.is_parametrized(layer):
        parametrize.remove_parametrizations(layer, "weight")
    # The original of a tied weight would share its memory with the weight. On shards it is a copy.
    elif layer.weight.dtype is torch.float32 and list(places(net).values()).count(places(net)[f"{name}.weight"]) == 1:
        weight_norm(layer)


@operation()
def draw(net: Program) -> None:
    net.register_buffer(net.fresh(), torch.randn(3))


def assert_same_bits(ours: Tensor, its: Tensor, what: str) -> None:
    """NaN included."""
    assert ours.dtype is its.dtype and ours.shape == its.shape, what
    one, other = (each.detach().clone().contiguous().view(-1).view(torch.uint8) for each in (ours, its))
    assert torch.equal(one, other), what


def places(net: nn.Module) -> dict[str, int]:
    """The number of the parameter at each name: equal for tied ones."""
    found: dict[int, int] = {}
    return {
        name: found.setdefault(id(parameter), len(found))
        for name, parameter in net.named_parameters(remove_duplicate=False)
    }
