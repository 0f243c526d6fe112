"""The calls of a training loop in an unusual order: the bits of plain PyTorch or an error, never a wrong gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import GeminiError, StaleGraphError, UnsupportedError, state_hash
from tests.zoo import mlp
from tests.zoo.mlp import (
    WIDTH,
    Mlp,
    assert_same,
    build,
    everywhere,
    loss_of,
    plain,
    sharded,
    train_step,
    weight,
    weights_of,
    wrap,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((None,), "max_norm"), ((-1.0,), "max_norm"), (("1",), "max_norm"), ((1.0, 3.0), "norm_type must be 2 or inf")],
)
def test_wrong_arguments_of_clipping_are_named(arguments: tuple[Any, ...], message: str) -> None:
    model, optimizer = sharded()
    loss_of(model).backward()
    with pytest.raises(ValueError, match=message):
        optimizer.clip_grad_norm_(*arguments)
    optimizer.step()


def test_a_backward_after_clipping_is_not_silently_left_out_of_the_norm() -> None:
    """The norm that was clipped by is not that of the gradients which step() would use."""
    model, optimizer = sharded()
    loss_of(model).backward()
    optimizer.clip_grad_norm_(1.0)
    (loss_of(model, 1) * float("nan")).backward()
    before = state_hash(model, optimizer)
    with pytest.raises(GeminiError, match=r"backward\(\) after clip_grad_norm_\(\)"):
        optimizer.step()
    assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    assert state_hash(model, optimizer) == before


@everywhere
def test_a_backward_through_a_graph_from_before_the_step_raises(place: str) -> None:
    model, optimizer = sharded(place)
    stale = loss_of(model)
    train_step(model, optimizer, 1)
    with pytest.raises((StaleGraphError, RuntimeError), match=r"before the last optimizer step|modified by an inplace"):
        stale.backward()
    optimizer.zero_grad()
    reference, plain_optimizer = plain()
    for step in (1, 2):
        train_step(reference, plain_optimizer, step)
    train_step(model, optimizer, 2)
    assert_same(weights_of(model), weights_of(reference))


@everywhere
def test_an_edit_between_forward_and_backward_never_gives_a_wrong_gradient(place: str) -> None:
    """Plain torch raises: the weight that backward needs is gone."""
    model, optimizer = sharded(place)
    loss = loss_of(model)
    with torch.no_grad():
        weight(model, 2).mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed since|edited"):
        loss.backward()
    optimizer.zero_grad()


class Aside(Mlp):
    """It has a parameter that its forward does not use, such as a copy that something else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Parameter(torch.ones(WIDTH))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_graph_outlives_values_that_are_set_for_a_neighbour_in_its_chunk(dtype: torch.dtype | None) -> None:
    both: list[tuple[Any, Any]] = [sharded(dtype=dtype, make=Aside, chunk_size=4096), plain(dtype, Aside)]
    for each, stepping in both:
        for step in range(2):
            loss = loss_of(each, step, dtype)
            values = torch.full((WIDTH,), 1.0 + step)
            each.load_state_dict({"aside": values}, strict=False)
            with torch.no_grad():
                each.aside.copy_(2 * values)
            loss.backward()
            stepping.step()
            stepping.zero_grad()
    mlp.assert_same_models(both)


@everywhere
def test_reading_weights_between_forward_and_backward_is_no_edit(place: str) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    average = torch.zeros(WIDTH, WIDTH)
    loss = loss_of(model)
    for layer in range(mlp.LAYERS):
        assert weight(model, layer).data.norm() > 0
        assert weight(model, layer).detach().numpy().shape == (WIDTH, WIDTH)
        with torch.no_grad():
            average.lerp_(weight(model, layer), 0.5)
    loss.backward()
    optimizer.step()
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_double_backward_works_or_is_refused() -> None:
    model, optimizer = sharded()
    reference = build()

    def penalty(module: nn.Module) -> Tensor:
        x = mlp.inputs(0).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()

    with pytest.raises(UnsupportedError, match="double backward"):
        penalty(model).backward()
    optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        loss_of(model).backward(create_graph=True)
    optimizer.zero_grad()
    resident = wrap("cuda")
    try:
        penalty(resident).backward()
    except UnsupportedError:
        return
    penalty(reference).backward()
    for mine, theirs in zip(resident.parameters(), reference.parameters()):
        assert torch.equal(mine.grad, theirs.grad)


class EnablesGrad(nn.Linear):
    """Autograd saves its weight although grad mode was off when its forward began: no hooks are there."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.tanh(x @ self.weight)


def test_an_unhooked_save_of_a_released_parameter_is_an_error_or_right() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(EnablesGrad(WIDTH, WIDTH, bias=False) for _ in range(6)))

    model, reference = wrap(make=make, chunk_size=256), build(make)
    x = mlp.inputs(0)
    with torch.no_grad():
        outputs = reference(x), model(x)
    assert torch.equal(*outputs)
    outputs[0].square().sum().backward()
    refused = None
    try:
        outputs[1].square().sum().backward()
    except RuntimeError as error:
        refused = error
    if refused is not None:
        assert "modified by an inplace operation" in str(refused) or isinstance(refused, GeminiError)
        return
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_function_that_keeps_a_parameter_object_reads_it_again_in_backward() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.x, ctx.w = x.detach(), w
            return x * w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad * ctx.w, (grad * ctx.x).sum(0)

    class Scaled(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x = Scale.apply(x, self.layers[0].bias)
            return super().forward(x)

    model, reference = wrap(make=Scaled), build(Scaled)
    loss_of(model).backward()
    loss_of(reference).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(mine.grad, theirs.grad)
