"""fp16 with a loss scale, beside plain fp16 modules with fp32 masters."""

from typing import Any

import pytest
import torch

from gemini import GeminiError, ShardedModel, ShardedOptimizer, safe_get_full_grad
from tests.harness.reference import Recipe, train_plain
from tests.harness.runs import assert_equal_runs
from tests.harness.sharded import train_sharded
from tests.zoo import mlp
from tests.zoo.models import MODELS

FP16: dict[str, Any] = {"dtype": torch.float16, "loss_scale": 2.0**8}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options", [{}, {"accumulation": 3}, {"clip": 0.05}, {"accumulation": 2, "clip": 0.05}], ids=str
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "nested", "sometimes_unused"])
def test_fp16_has_the_bits_of_a_plain_module_with_masters(name: str, options: dict[str, Any]) -> None:
    run, facts = train_sharded(
        MODELS[name], Recipe(steps=3, **FP16, **options), read_grads=False, model_data_memory="smallest"
    )
    wanted = train_plain(MODELS[name], 3, **FP16, **options)
    wanted.grads = wanted.buffers = None
    assert_equal_runs(run, wanted)
    assert facts.num_evictions > 0 or name != "gpt2"


def trained(**arguments: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    model = mlp.wrap("cuda", dtype=torch.float16)
    return model, ShardedOptimizer(model, mlp.adam(model.parameters()), **arguments)


def loss_of(model: ShardedModel, step: int = 0) -> torch.Tensor:
    return mlp.loss_of(model, step, torch.float16).float()


def test_a_skipped_step_leaves_nothing_behind_but_a_lower_scale() -> None:
    models = [trained(initial_scale=64.0, hysteresis=1, growth_interval=2) for _ in range(2)]
    (model, optimizer), (calm, calm_optimizer) = models
    for step in range(2):
        for each, its in models:
            its.backward(loss_of(each, step))
            its.step()
    assert optimizer.loss_scale == 128.0
    optimizer.backward(loss_of(model, 2))  # the first of two micro-batches is good
    optimizer.backward(loss_of(model, 3) * float("inf"))
    with pytest.warns(UserWarning, match=r"step 3 skipped on all ranks: the gradient of 'layers"):
        optimizer.step()
    assert optimizer.loss_scale == 64.0
    assert optimizer.last_step is not None and optimizer.last_step.skipped is not None
    assert optimizer.last_step.loss_scale == 128.0
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(calm))
    for each, its in models:  # another scale, the same bits: powers of two
        its.backward(loss_of(each, 4))
        its.step()
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(calm))
    assert torch.equal(optimizer.grad_norm, calm_optimizer.grad_norm), "the norm is that of the true gradients"


def test_the_scale_is_saved_and_loaded() -> None:
    model, optimizer = trained(initial_scale=64.0, hysteresis=1)
    optimizer.backward(loss_of(model) * float("inf"))
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    saved = optimizer.state_dict()
    _, its = trained(initial_scale=64.0)
    its.load_state_dict(saved)
    assert its.loss_scale == 32.0
    with pytest.raises(ValueError, match="a loss scale's state has"):
        its.load_state_dict(saved | {"loss_scale": {"scale": 1.0}})
    with pytest.raises(ValueError, match="param groups"):
        its.load_state_dict(saved | {"param_groups": [], "loss_scale": saved["loss_scale"] | {"scale": 2.0}})
    assert its.loss_scale == 32.0, "nothing changed"


@pytest.mark.filterwarnings("ignore:step .* skipped")
def test_a_scale_falls_for_as_many_steps_as_it_takes() -> None:
    model, optimizer = trained(initial_scale=2.0**32, hysteresis=1)
    while optimizer.last_step is None or optimizer.last_step.skipped is not None:
        optimizer.backward(loss_of(model) * 1e4)
        optimizer.step()
    assert optimizer.last_step.number > 21
    assert optimizer.loss_scale > 1.0


def test_a_backward_without_the_scale_is_refused_before_anything_happens() -> None:
    model, optimizer = trained()
    with pytest.raises(GeminiError, match=r"call optimizer\.backward\(loss\)"):
        loss_of(model).backward()
    before = mlp.weights_of(model)
    optimizer.step()
    mlp.assert_same(mlp.weights_of(model), before)
    optimizer.backward(loss_of(model) / 1024)
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.skipped is None


def test_a_loop_that_calls_backward_itself_scales_its_losses() -> None:
    (model, optimizer), (other, its) = trained(initial_scale=64.0), trained(initial_scale=64.0)
    for step in range(2):
        its.backward(loss_of(other, step) + loss_of(other, step + 1))
        its.step()
        scaled = [optimizer.scale(loss_of(model, each)) for each in (step, step + 1)]
        torch.autograd.backward([scaled[0] + scaled[1]])
        with pytest.raises(GeminiError, match=r"optimizer\.scale\(loss\)\.backward\(\)"):
            loss_of(model).backward()
        model.zero_grad()
        (optimizer.scale(loss_of(model, step)) + optimizer.scale(loss_of(model, step + 1))).backward()
        optimizer.step()
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(other))


class Fails(torch.autograd.Function):
    """A loss whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")


def test_a_scaled_backward_that_fails_or_misses_the_model_allows_no_other_one() -> None:
    model, optimizer = trained()
    with pytest.raises(ValueError, match="not today"):
        optimizer.scale(Fails.apply(loss_of(model))).backward()
    with pytest.raises(GeminiError, match="without the loss scale"):
        loss_of(model).backward()
    optimizer.zero_grad()
    x = torch.ones((), requires_grad=True)
    optimizer.scale(x * 2).backward()
    assert x.grad is not None and float(x.grad) == 2.0 * optimizer.loss_scale
    with pytest.raises(GeminiError, match="without the loss scale"):
        loss_of(model).backward()


def test_gradients_that_stay_are_those_of_the_loss_whatever_the_scale_becomes() -> None:
    model = mlp.wrap("cuda", dtype=torch.float16)
    mine = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    optimizer = ShardedOptimizer(model, mlp.adam(iter(mine)), initial_scale=64.0, growth_interval=1)
    bias = model.module.layers[1].bias
    optimizer.backward(loss_of(model))
    before = safe_get_full_grad(bias)
    assert before is not None
    optimizer.step()
    assert optimizer.loss_scale == 128.0
    after = safe_get_full_grad(bias)
    assert after is not None
    assert torch.equal(after, before)


def test_where_nothing_is_fp16_nothing_is_scaled() -> None:
    model, optimizer = mlp.sharded("cuda")
    assert optimizer.loss_scale == 1.0
    loss = mlp.loss_of(model)
    assert optimizer.scale(loss) is loss
    mlp.loss_of(model).backward()
    optimizer.step()
    assert "loss_scale" not in optimizer.state_dict()
