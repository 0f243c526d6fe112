"""What is resident for good on one rank costs what plain PyTorch costs: calls are counted, nothing is timed."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, safe_get_full_grad
from optim import HybridAdam
from tests.zoo import mlp

WIDTH = 8


def chain(layers: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def wrapped(layers: int, **arguments: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(chain(layers), device="emulated", chunk_size=2**16, **arguments)
    return model, ShardedOptimizer(model, HybridAdam(groups(model), lr=1e-2))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for weights only, as most recipes have it."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def python_calls(function: Callable[[], Any]) -> int:
    """Calls of Python functions, and of generators that go on, while `function` runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()  # what earlier tests have left would be freed inside, by calls that count
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def per_layer(calls_of: Callable[[int], int]) -> float:
    """What one layer more adds to a count."""
    return (calls_of(60) - calls_of(20)) / 40


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(4, WIDTH)).square().mean()
    return loss


def test_an_operators_forward_makes_the_calls_that_it_makes_in_plain_pytorch() -> None:
    def calls_of(model: nn.Module) -> int:
        loss_of(model).backward()
        return python_calls(lambda: model(torch.ones(4, WIDTH)))

    plain = per_layer(lambda layers: calls_of(chain(layers)))
    assert per_layer(lambda layers: calls_of(wrapped(layers)[0])) == plain


def test_a_gradient_costs_one_python_call() -> None:
    def calls_of(layers: int) -> int:
        model, optimizer = wrapped(layers)
        loss_of(model).backward()
        optimizer.step()
        loss = loss_of(model)
        return python_calls(loss.backward)

    assert per_layer(calls_of) <= 2 * 1.2  # a weight and a bias, and what a chunk more costs


def test_a_step_with_two_param_groups_makes_no_calls_for_a_parameter() -> None:
    def calls_of(layers: int) -> int:
        model, optimizer = wrapped(layers)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
        loss_of(model).backward()
        return python_calls(optimizer.step)

    assert per_layer(calls_of) <= 1


class Watched(nn.Linear):
    """Notes what there is around its forward."""

    seen: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {
            "plain": type(self.weight) is nn.Parameter,
            "hooks": len(self._forward_pre_hooks) + len(self._forward_hooks),
            "handles": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        }
        return super().forward(x)


ALONE = {"plain": True, "hooks": 0, "handles": False}


def watched(**arguments: Any) -> tuple[Watched, ShardedModel]:
    first = Watched(WIDTH, WIDTH)
    module = nn.Sequential(first, *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    return first, ShardedModel(module, device="emulated", chunk_size=512, **arguments)


def test_a_resident_operator_has_no_hook_and_no_handle_inside_the_model_and_hooks_of_its_own_outside() -> None:
    first, model = watched()
    loss_of(model).backward()
    assert first.seen == ALONE
    first(torch.ones(1, WIDTH)).sum().backward()
    assert first.seen == ALONE | {"hooks": 2}
    assert type(first.weight) is not nn.Parameter


def test_users_hooks_stay_where_they_are() -> None:
    first, model = watched()
    calls: list[str] = []
    first.register_forward_pre_hook(lambda its, args: calls.append(f"before {type(its.weight).__name__}"))
    handle = first.register_forward_hook(lambda its, args, out: calls.append(f"after {type(its.weight).__name__}"))
    for _ in range(2):
        loss_of(model).backward()
    first(torch.ones(1, WIDTH))
    assert calls[:2] == calls[2:4] == ["before Parameter", "after Parameter"]
    assert calls[4] == "before Parameter"
    handle.remove()
    calls.clear()
    loss_of(model)
    assert calls == ["before Parameter"]


def test_hooks_that_users_register_inside_a_forward_stay_until_they_are_removed() -> None:
    first, model = watched()
    calls: list[str] = []
    handles: list[Any] = []

    def register(*_: Any) -> None:
        if not handles:
            handles.append(first.register_forward_pre_hook(lambda its, args: calls.append(type(its.weight).__name__)))
            handles.append(first.register_forward_hook(lambda *_: calls.append("after")))

    model.module[2].register_forward_pre_hook(register)
    for _ in range(3):
        loss_of(model).backward()
    assert calls == ["Parameter", "after"] * 2, "from the second forward on"
    first(torch.ones(1, WIDTH))
    assert calls[4:] == ["Parameter", "after"], "inside the model's own hooks"
    for handle in handles:
        handle.remove()
    calls.clear()
    loss_of(model).backward()
    first(torch.ones(1, WIDTH))
    assert not calls and first.seen == ALONE | {"hooks": 2}
    model.close()
    assert not (first._forward_pre_hooks or first._forward_hooks)


def test_a_hook_in_place_of_all_others_is_called_inside_the_model() -> None:
    first, model = watched()
    loss_of(model).backward()
    for hooks in (first._forward_pre_hooks, first._forward_hooks):
        hooks.clear()
    calls: list[int] = []
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    first.register_forward_hook(lambda *_: calls.append(2))
    loss_of(model).backward()
    assert calls == [1, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hooks_are_back_after_a_forward_that_failed(error: type[BaseException]) -> None:
    first, model = watched()

    def fail(*_: Any) -> None:
        raise error("stopped")

    handle = model.module[2].register_forward_pre_hook(fail)
    with pytest.raises(error):
        loss_of(model)
    handle.remove()
    first(torch.ones(1, WIDTH))
    assert first.seen["hooks"] == 2
    loss_of(model).backward()
    assert first.seen == ALONE


def test_hooks_come_back_when_a_new_placement_lets_chunks_leave() -> None:
    least = mlp.smallest_budget(chunk_size=mlp.CHUNK_NUMEL)
    between = least + 6 * 4 * mlp.CHUNK_NUMEL  # resident while only the last layer's chunk is trained
    plain, plain_optimizer = mlp.plain()
    module = mlp.build()
    for each in (plain, module):
        each.layers[:-1].requires_grad_(False)
    model = ShardedModel(module, device="emulated", chunk_size=mlp.CHUNK_NUMEL, model_data_memory=between)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    residence = []
    for step in range(4):
        if step == 2:
            for each in (plain, model.module):
                each.requires_grad_(True)
        for its_model, its_optimizer in ((plain, plain_optimizer), (model, optimizer)):
            mlp.train_step(its_model, its_optimizer, step)
        residence.append(model.chunk_manager.step.payloads.is_resident)
    assert residence == [True, True, False, False], "the budget of this test lets chunks leave when all are trained"
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))


def test_a_graph_from_before_a_step_is_refused_as_in_plain_pytorch() -> None:
    for model, optimizer in (wrapped(3), (plain := chain(3), HybridAdam(groups(plain)))):
        graph = loss_of(model)
        loss_of(model).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


def test_create_graph_works_where_everything_is_resident() -> None:
    grads = []
    for model in (chain(3), wrapped(3)[0]):
        x = torch.ones(4, WIDTH, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), x)
        grads.append(again)
    assert torch.equal(*grads)


def test_the_first_gradient_is_copied_and_not_added_to_zero() -> None:
    model, _ = wrapped(1)
    (model(torch.zeros(4, WIDTH)) * torch.tensor(-0.0)).sum().backward()
    weight = next(model.parameters())
    grad = safe_get_full_grad(weight)
    plain = chain(1)
    (plain(torch.zeros(4, WIDTH)) * torch.tensor(-0.0)).sum().backward()
    assert plain[0].weight.grad is not None and grad is not None
    assert torch.equal(torch.signbit(grad), torch.signbit(plain[0].weight.grad))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_param_groups_and_idle_parameters_change_no_bit(dtype: torch.dtype | None) -> None:
    """Runs of a group, of idle parameters and of other step counts, beside one another and from step to step."""
    plain: nn.Sequential = mlp.build(lambda: chain(6))
    model = ShardedModel(mlp.build(lambda: chain(6)), device="emulated", chunk_size=2**16, dtype=dtype)
    plain = plain if dtype is None else plain.to(dtype)
    optimizers = [HybridAdam(groups(plain), lr=1e-2), ShardedOptimizer(model, HybridAdam(groups(model), lr=1e-2))]
    for step in range(6):
        used = slice(step % 3, 6 - step // 4)
        for each, optimizer in zip((plain, model.module), optimizers, strict=True):
            x = mlp.inputs(step, dtype)[:, :WIDTH]
            (nn.Sequential(*each)[used](x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
