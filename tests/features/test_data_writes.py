"""Writes through `.data` inside a forward: what plain PyTorch computes, wherever the weights rest."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import HybridAdam, ShardedModel, ShardedOptimizer, StaleGraphError
from tests.harness.on_ranks import on_ranks

WIDTH = 32


def bounded(weight: Tensor) -> Tensor:
    return torch.renorm(weight.float(), p=2, dim=0, maxnorm=0.5).to(weight.dtype)


def assign(weight: nn.Parameter) -> None:
    weight.data = bounded(weight.data)


def assign_without_data(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.data = bounded(weight)


def copy_in_place(weight: nn.Parameter) -> None:
    weight.data.copy_(bounded(weight.data))


def items(weight: nn.Parameter) -> None:
    weight.data[1:3] = weight.data[1:3] * 0.5
    weight.data[0].zero_()


def through_a_view(weight: nn.Parameter) -> None:
    flat = weight.data.view(-1)
    flat[:7].mul_(0.5)
    torch._foreach_mul_([flat[9:11]], 2.0)


def source(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.set_(bounded(weight.data))


class Writing(torch.autograd.Function):
    """Its forward writes to the weight that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight.data.mul_(0.75)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


FORMS: dict[str, Callable[[nn.Parameter], None]] = {
    each.__name__: each for each in (assign, assign_without_data, copy_in_place, items, through_a_view, source)
}


class Layer(nn.Linear):
    """Writes to its own weight in its forward."""

    def __init__(self, form: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "function":
            x = Writing.apply(x, self.weight)
        elif self.form in FORMS:
            FORMS[self.form](self.weight)
        return super().forward(x)


class Net(nn.Module):
    """`where`: the writing layer's own forward, the root's, or a hook. A frozen average follows the first layer."""

    def __init__(self, form: str, where: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = Layer(form if where == "own" else "nothing")
        self.average = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 4)
        self.form, self.where = form, where
        if where == "hook":
            self.second.register_forward_pre_hook(lambda module, given: FORMS[form](module.weight))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.where == "root":
            FORMS[self.form](self.second.weight)
        with torch.no_grad():
            for own, other in zip(self.average.parameters(), self.first.parameters(), strict=True):
                own.data = own.data * 0.9 + other.data * 0.1
        out: Tensor = self.last(torch.tanh(self.second(h)) - self.average(h))
        return out


PLACES: list[dict[str, Any]] = [
    {},
    {"tensor_placement_policy": "cpu"},
    {"device": "emulated", "chunk_size": 1024 + 256, "model_data_memory": "least"},
]
CASES = [(form, "own") for form in (*FORMS, "function")] + [(form, w) for form in FORMS for w in ("root", "hook")]


def inputs(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def train(model: nn.Module, optimizer: Any, rank: int, dtype: torch.dtype) -> list[float]:
    losses = []
    for step in range(4):
        loss = model(inputs(step, rank, dtype)).float().square().mean()
        optimizer.backward(loss) if isinstance(optimizer, ShardedOptimizer) else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def wrap(form: str, where: str, place: dict[str, Any], dtype: torch.dtype) -> tuple[ShardedModel, ShardedOptimizer]:
    torch.manual_seed(0)
    options = dict(place)
    if options.get("model_data_memory") == "least":
        del options["model_data_memory"]
        probe = ShardedModel(Net(form, where), dtype=dtype, **options)
        options["model_data_memory"] = f"{probe.plan.packed_minimum_bytes}B"
        torch.manual_seed(0)
    model = ShardedModel(Net(form, where), dtype=dtype, **options)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, ShardedOptimizer(model, HybridAdam(trained, lr=1e-2), initial_scale=1.0)


@on_ranks(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
@pytest.mark.parametrize("place", PLACES, ids=["resident", "cpu", "least"])
def test_a_write_in_a_forward_counts_as_in_plain_pytorch(
    rank: int, world_size: int, case: tuple[str, str], place: dict[str, Any]
) -> None:
    model, optimizer = wrap(*case, place, torch.float32)
    torch.manual_seed(0)
    plain = Net(*case)
    adam = HybridAdam([each for each in plain.parameters() if each.requires_grad], lr=1e-2)
    assert train(model, optimizer, 0, torch.float32) == train(plain, adam, 0, torch.float32)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("which", [("assign", "own"), ("items", "own"), ("copy_in_place", "root")], ids=str)
def test_the_place_of_the_weights_does_not_decide_the_result(
    rank: int, world_size: int, which: tuple[str, str], dtype: torch.dtype
) -> None:
    found = []
    for place in PLACES:
        model, optimizer = wrap(*which, place, dtype)
        losses = train(model, optimizer, rank, dtype)
        found.append((losses, model.state_dict(), optimizer.state_dict()["masters"]))
    (losses, weights, masters), *others = found
    for its_losses, its_weights, its_masters in others:
        assert its_losses == losses
        assert all(torch.equal(its_weights[name], value) for name, value in weights.items())
        assert all(torch.equal(its_masters[number], value) for number, value in masters.items())


@on_ranks(1)
def test_masters_keep_their_fractions_where_a_weight_was_only_read(rank: int, world_size: int) -> None:
    """A quantiser that reads `.data` of a bf16 weight must not round its master."""

    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.largest = float(self.weight.data.abs().max())
            return super().forward(x)

    for place in PLACES[:2]:
        runs = []
        for kind in (nn.Linear, Reads):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH))
            model = ShardedModel(module, dtype=torch.bfloat16, **place)
            optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-4))
            train(model, optimizer, 0, torch.bfloat16)
            runs.append(optimizer.state_dict()["masters"])
        assert all(torch.equal(runs[0][number], value) for number, value in runs[1].items())


@on_ranks(1)
@pytest.mark.parametrize("place", PLACES[:2], ids=["resident", "cpu"])
def test_a_graph_that_has_used_the_old_values_is_refused_and_not_wrong(
    rank: int, world_size: int, place: dict[str, Any]
) -> None:
    """Plain PyTorch keeps the old values for a layer's own product, which a chunk cannot."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer("assign")

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(self.layer(x) * 3.0)
            return out

    model = ShardedModel(Twice(), **place)
    loss = model(torch.randn(2, WIDTH, requires_grad=True)).sum()
    with pytest.raises((StaleGraphError, RuntimeError), match=r"layer\.weight|inplace"):
        loss.backward()


@on_ranks(1)
def test_a_copy_made_in_a_forward_is_a_plain_parameter(rank: int, world_size: int) -> None:
    class Copies(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.copies = [copy.deepcopy(self.weight)]
            return super().forward(x)

    model = ShardedModel(nn.Sequential(Copies(4, 4)))
    model(torch.ones(1, 4))
    (made,) = model.module[0].copies
    assert type(made) is nn.Parameter and torch.equal(made, model.state_dict()["0.weight"])
