"""Writes through `.data` inside a forward, in every form and from every place that users make them."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini import GeminiError, ShardedOptimizer, StaleGraphError
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import PLACES, WIDTH, adam, assert_same, build, loss_of, plain, sharded, train_step, weights_of, wrap

Write = Callable[[nn.Parameter], Any]


def _assign(p: nn.Parameter) -> None:
    p.data = p.data * 0.5


def _assign_with_graph(p: nn.Parameter) -> None:
    p.data = torch.renorm(p, p=2, dim=0, maxnorm=0.25)


def _assign_own_transpose(p: nn.Parameter) -> None:
    p.data = p.data.t()


def _set_item(p: nn.Parameter) -> None:
    p.data[0] = 0.25


def _through_numpy(p: nn.Parameter) -> None:
    p.data.view(torch.int16 if p.dtype.itemsize == 2 else torch.int32).numpy()[1] = 0


def _through_kept(p: nn.Parameter) -> None:
    kept = p.data
    kept.view(-1)[3:9].fill_(0.125)
    kept.chunk(2)[0].mul_(0.5)


def _set_tensor(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.set_(p.data * 0.5)


def _torchs_set(p: nn.Parameter) -> None:
    with torch.no_grad():
        torch.Tensor.set_(p, p.detach() * 0.5)


WRITES: dict[str, Write] = {
    "data =": _assign,
    "data = renorm(p)": _assign_with_graph,
    "data = data.t()": _assign_own_transpose,
    "copy_": lambda p: p.data.copy_(p.data * 0.5),
    "mul_": lambda p: p.data.mul_(0.5),
    "setitem": _set_item,
    "numpy": _through_numpy,
    "foreach": lambda p: torch._foreach_mul_([p.data], 0.5),
    "kept": _through_kept,
    "set_": _set_tensor,
}
REPLACES = ("data =", "data = renorm(p)", "data = data.t()", "set_")


class _Scale(torch.autograd.Function):
    """Writes to the weight that it is given, and uses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, write: Write) -> Tensor:
        write(weight)  # type: ignore[arg-type]
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x, None


class Layer(nn.Linear):
    write: Write | None = None
    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None and self.where == "before":
            self.write(self.weight)
        if self.write is not None and self.where == "function":
            return _Scale.apply(x, self.weight, self.write) + self.bias
        y = super().forward(x)
        if self.write is not None and self.where == "after":
            self.write(self.weight)
        return y


class Net(nn.Module):
    """The root writes to the weights of others, before they run and after."""

    root_write: Write | None = None
    root_where = ""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.root_write is not None and self.root_where == "root first":
            self.root_write(self.layers[3].weight)  # type: ignore[arg-type]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.root_write is not None and self.root_where == "root last":
            self.root_write(self.layers[1].weight)  # type: ignore[arg-type]
        return x


def _none(result: object) -> None:
    """A hook that returns something replaces its module's input or output."""


def _plant(module: Any, write: Write, where: str) -> None:
    """Let the forward of `module`, a `Net`, make the write."""
    layer = module.layers[2]
    if where == "pre-hook":
        layer.register_forward_pre_hook(lambda module, args: _none(write(module.weight)))
    elif where == "hook":
        layer.register_forward_hook(lambda module, args, output: _none(write(module.weight)))
    elif where.startswith("root"):
        module.root_write, module.root_where = write, where
    else:
        layer.write, layer.where = write, where


def _two_steps(both: list[tuple[Any, Any]], dtype: torch.dtype | None) -> None:
    (model, optimizer), (reference, plain_optimizer) = both
    for step in range(2):
        assert torch.equal(
            train_step(model, optimizer, step, dtype), train_step(reference, plain_optimizer, step, dtype)
        )
        assert_same(weights_of(model), weights_of(reference))
    if dtype is not None:
        masters = optimizer.state_dict()["masters"]
        for number, p in enumerate(reference.parameters()):
            if p.requires_grad:
                assert torch.equal(masters[number], plain_optimizer.state[p]["master"]), f"master {number}"


@on_ranks(1, 2)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("where", ["before", "function", "pre-hook", "root first"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_use_gives_what_plain_pytorch_computes(
    rank: int, world_size: int, write: str, where: str, dtype: torch.dtype | None
) -> None:
    for place in PLACES:
        both = [sharded(place, dtype=dtype, make=Net), plain(dtype, Net)]
        for module in (both[0][0].module, both[1][0]):
            _plant(module, WRITES[write], where)
        _two_steps(both, dtype)


@on_ranks(1, 2)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("where", ["after", "hook", "root last"])
@pytest.mark.parametrize("write", [name for name in WRITES if name not in REPLACES])
def test_a_write_in_place_after_the_use_gives_what_plain_pytorch_computes(
    rank: int, world_size: int, write: str, where: str, dtype: torch.dtype | None
) -> None:
    """Plain PyTorch's backward goes on with the new values: so does ours."""
    for place in PLACES:
        both = [sharded(place, dtype=dtype, make=Net), plain(dtype, Net)]
        for module in (both[0][0].module, both[1][0]):
            _plant(module, WRITES[write], where)
        _two_steps(both, dtype)


@on_ranks(1, 2)
@pytest.mark.parametrize("place", PLACES)
def test_new_data_after_the_use_in_a_graph_is_refused_before_anything_is_lost(
    rank: int, world_size: int, place: str
) -> None:
    """Plain PyTorch keeps the old values for backward, in other memory: chunks have none."""
    model, _ = sharded(place, make=Net)
    _plant(model.module, _assign, "after")
    wanted = build(Net)
    wanted.layers[2].weight.data.mul_(0.5)
    loss = loss_of(model)
    with pytest.raises((GeminiError, RuntimeError), match=r"modified by an inplace operation"):
        loss.backward()
    assert_same(weights_of(model), weights_of(wanted))


class Teacher(nn.Module):
    """A frozen average of the trained half, moved in the forward as MoCo moves its key encoder."""

    write: Callable[[nn.Parameter, nn.Parameter], Any]

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.teacher = deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = z = x
        for layer in self.student:
            y = torch.tanh(layer(y))
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.write(own, other)
            for layer in self.teacher:
                z = torch.tanh(layer(z))
        return y - z


def _ema_assign(own: nn.Parameter, other: nn.Parameter) -> None:
    own.data = own.data * 0.5 + other.data * 0.5


AVERAGES: dict[str, Any] = {
    "data =": _ema_assign,
    "data.mul_.add_": lambda own, other: own.data.mul_(0.5).add_(other.data, alpha=0.5),
    "data.lerp_": lambda own, other: own.data.lerp_(other.data, 0.5),
    "foreach": lambda own, other: torch._foreach_lerp_([own.data], [other.data], 0.5),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("write", AVERAGES)
def test_a_frozen_average_that_the_forward_moves_is_that_of_plain_pytorch(
    rank: int, world_size: int, write: str, dtype: torch.dtype | None
) -> None:
    for place in PLACES:
        model = wrap(place, dtype=dtype, make=Teacher)
        reference = build(Teacher).to(dtype or torch.float32)
        both = []
        for module, optimizer in ((model, ShardedOptimizer), (reference, None)):
            (module.module if optimizer else module).write = AVERAGES[write]
            own = adam(p for p in module.parameters() if p.requires_grad)
            both.append((module, optimizer(module, own) if optimizer else own))
        for step in range(3):
            losses = [train_step(*pair, step, dtype) for pair in both]
            assert torch.equal(*losses), place
            assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize("place", PLACES)
def test_a_read_of_data_costs_a_master_no_bit(place: str) -> None:
    both = [sharded(place, dtype=torch.bfloat16, make=Net), plain(torch.bfloat16, Net)]
    for module in (both[0][0].module, both[1][0]):
        _plant(module, lambda p: p.data.norm(), "before")
    _two_steps(both, torch.bfloat16)


@pytest.mark.parametrize("place", PLACES)
def test_torch_has_its_own_data_again_after_a_forward(place: str) -> None:
    model, optimizer = sharded(place, make=Net)
    train_step(model, optimizer)
    model.module.layers[0](torch.ones(2, WIDTH))  # type: ignore[operator, index]
    _plant(model.module, lambda p: 1 / 0, "before")
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    assert not {"data", "set_"} & set(nn.Parameter.__dict__)


def test_a_cast_that_backward_needs_is_refused_after_a_write() -> None:
    model, _ = sharded("smallest", make=Net)
    _plant(model.module, lambda p: p.data.mul_(0.5), "after")
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    with pytest.raises(GeminiError, match=r"layers\.2\.weight.*cast.*\.data"):
        loss.backward()


@pytest.mark.parametrize("place", PLACES)
def test_data_of_another_shape_is_refused_by_name_in_a_forward(place: str) -> None:
    model, _ = sharded(place, make=Net)

    def shrink(p: nn.Parameter) -> None:
        p.data = p.data[:4]

    _plant(model.module, shrink, "before")
    with pytest.raises(GeminiError, match=r"layers\.2\.weight.*its \.data cannot be"):
        loss_of(model)
    del model.module.layers[2].write  # type: ignore[union-attr, index]
    assert_same(weights_of(model), weights_of(build(Net)))


def test_new_parameters_of_a_plain_one_are_made_as_ever() -> None:
    model, _ = sharded("smallest", make=Net)
    found: list[Any] = []
    _plant(model.module, lambda p: found.append((type(p), type(nn.Parameter(p)), F.linear(p, p).shape)), "before")
    loss_of(model)
    assert found == [(nn.Parameter, nn.Parameter, torch.Size([WIDTH, WIDTH]))]


@pytest.mark.parametrize("place", PLACES)
def test_torchs_own_set_counts_after_the_step_or_is_refused(place: str) -> None:
    """Called past the class (`torch.Tensor.set_(p, ...)`): it shows only afterwards, by the parameter's memory."""
    both = [sharded(place, make=Net), plain(None, Net)]
    for module, optimizer in ((both[0][0].module, both[0][1]), both[1]):
        _plant(module, _torchs_set, "before")
        loss = loss_of(module)
        try:
            loss.backward()
        except StaleGraphError:
            return
        optimizer.step()
    assert_same(weights_of(both[0][0]), weights_of(both[1][0]))
