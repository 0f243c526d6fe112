"""The ordinary training loop means what it means in plain PyTorch, wherever the state lives."""

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, state_hash
from gemini.optimizer.elementwise import TESTED
from optim import CPUAdam, HybridAdam
from tests.mlp import (
    CHUNK_NUMEL,
    LAYERS,
    PLACES,
    WIDTH,
    Mlp,
    adam,
    assert_same,
    build,
    inputs,
    loss_of,
    plain,
    sharded,
    train_step,
    weights_of,
    wrap,
)

everywhere = pytest.mark.parametrize("place", PLACES)
both_dtypes = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])


def pairs(place: str = "smallest", dtype: torch.dtype | None = None, make: Any = Mlp) -> list[tuple[Any, Any]]:
    """(model, optimizer), sharded and plain."""
    return [sharded(place, dtype=dtype, make=make), plain(dtype, make)]


def assert_same_models(both: list[tuple[Any, Any]]) -> None:
    (model, _), (reference, _) = both
    assert_same(weights_of(model), weights_of(reference))


def layer_of(model: nn.Module, number: int) -> nn.Linear:
    return (model.module if isinstance(model, ShardedModel) else model).layers[number]


# ---- gradients and zero_grad -----------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("when", ["before_backward", "after_step", "both", "on_the_model", "set_to_zero"])
def test_zero_grad_may_stand_anywhere(when: str, dtype: torch.dtype | None) -> None:
    both = pairs(dtype=dtype)
    for model, optimizer in both:
        for step in range(3):
            if when in ("before_backward", "both"):
                optimizer.zero_grad()
            loss_of(model, step, dtype).backward()
            optimizer.step()
            if when in ("after_step", "both"):
                optimizer.zero_grad()
            elif when == "on_the_model":
                model.zero_grad()
            elif when == "set_to_zero":
                optimizer.zero_grad(set_to_none=False)
    assert_same_models(both)


def test_step_consumes_the_gradients_without_zero_grad() -> None:
    (model, optimizer), (reference, plain_optimizer) = pairs()
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()  # no zero_grad: there is nothing left
        assert all(p.grad is None for p in model.parameters())
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


def test_zero_grad_between_backwards_discards() -> None:
    both = pairs()
    for model, optimizer in both:
        loss_of(model, 0).backward()
        optimizer.zero_grad()
        train_step(model, optimizer, 1)
    assert_same_models(both)


@both_dtypes
@everywhere
def test_optimizer_backward_is_loss_backward(place: str, dtype: torch.dtype | None) -> None:
    hashes = []
    for by_optimizer in (True, False):
        model, optimizer = sharded(place, dtype=dtype)
        for step in range(2):
            loss = loss_of(model, step, dtype)
            if by_optimizer:
                optimizer.backward(loss)
            else:
                loss.backward()
            optimizer.step()
        hashes.append(state_hash(model, optimizer))
    assert hashes[0] == hashes[1]


class Idle(Mlp):
    """Owns a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


@everywhere
def test_grad_is_the_plain_gradient_and_reading_it_changes_nothing(place: str) -> None:
    both = pairs(place, make=Idle)
    (model, optimizer), (reference, plain_optimizer) = both
    assert all(p.grad is None for p in model.parameters())
    for step in range(3):
        for micro in range(2):
            loss_of(model, 10 * step + micro).backward()
            loss_of(reference, 10 * step + micro).backward()
            before = state_hash(model, optimizer), optimizer.model.executor.gradients.num_backwards
            for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
                if name.startswith("idle."):
                    assert mine.grad is None
                    assert theirs.grad is None
                    continue
                grad = mine.grad
                assert grad is not None
                assert grad.shape == theirs.grad.shape
                assert grad.dtype == theirs.grad.dtype
                assert torch.equal(grad, theirs.grad)
                assert torch.equal(grad.clone(), theirs.grad)
                assert float(grad.norm()) == float(theirs.grad.norm())
                assert torch.equal(grad * 2, theirs.grad * 2)
                assert torch.equal(grad.data.abs().max(), theirs.grad.abs().max())
                assert torch.equal(torch.zeros_like(theirs.grad).add_(grad), theirs.grad)
            assert (state_hash(model, optimizer), optimizer.model.executor.gradients.num_backwards) == before
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    assert_same_models(both)


def test_the_true_norm_is_reported_without_clipping_too() -> None:
    model, optimizer = sharded()
    loss_of(model).backward()
    reference = build()
    loss_of(reference).backward()
    wanted = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in reference.parameters()]).double())
    optimizer.step()
    assert optimizer.grad_norm.dim() == 0
    assert abs(float(optimizer.grad_norm) - float(wanted)) < 1e-6 * float(wanted)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_norm_read_through_torch_equals_ours(norm_type: float) -> None:
    model, optimizer = sharded()
    loss_of(model).backward()
    ours = optimizer.clip_grad_norm_(1e9, norm_type)
    theirs = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    assert torch.allclose(ours, theirs, rtol=1e-6)


# ---- schedulers, groups, closures ------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=8, cycle_momentum=True),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step\\(\\)`:UserWarning")
def test_a_scheduler_drives_the_sharded_optimizer_as_the_plain_one(name: str) -> None:
    both = pairs()
    groups: list[list[dict[str, Any]]] = []
    for model, optimizer in both:
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        for step in range(5):
            train_step(model, optimizer, step)
            scheduler.step()
            seen.append({k: v for k, v in optimizer.param_groups[0].items() if k in ("lr", "betas")})
        groups.append(seen)
    assert groups[0] == groups[1]
    assert len({str(group) for group in groups[0]}) > 1
    if name == "one_cycle":
        assert len({group["betas"] for group in groups[0]}) > 1, "momentum cycles too"
    assert_same_models(both)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`:UserWarning")
def test_a_scheduler_of_the_inner_optimizer_works_too() -> None:
    """torch warns that the inner one never steps."""
    (model, _), (reference, plain_optimizer) = [(wrap(), None), plain()]
    inner = adam(model.parameters())
    optimizer = ShardedOptimizer(model, inner)
    schedulers = [SCHEDULERS["lambda"](o) for o in (inner, plain_optimizer)]
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(weights_of(model), weights_of(reference))


@everywhere
@pytest.mark.parametrize("kind", ["hybrid_adam", "adamw"])
def test_groups_inside_one_chunk_keep_their_hyperparameters(place: str, kind: str) -> None:
    def grouped(model: nn.Module) -> Any:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if n.endswith("bias")], "lr": 3e-2, "weight_decay": 0.0},
            {"params": [p for n, p in named if n.endswith("weight")], "betas": (0.5, 0.9), "weight_decay": 0.3},
        ]
        if kind == "hybrid_adam":
            return HybridAdam(groups, lr=1e-2)
        return torch.optim.AdamW(groups, lr=1e-2, foreach=False)

    model, reference = wrap(place, chunk_size=2 * CHUNK_NUMEL), build()
    assert all(len(chunk.parameters) >= 2 for chunk in model.executor.chunks)
    optimizer, plain_optimizer = ShardedOptimizer(model, grouped(model)), grouped(reference)
    assert len(optimizer.param_groups) == 2
    for step in range(4):
        if step == 2:
            for its in (optimizer, plain_optimizer):
                its.param_groups[0]["lr"] = 0.5
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


def test_parameters_that_no_group_has_do_not_move() -> None:
    model, reference = wrap(), build()
    optimizer = ShardedOptimizer(model, adam(p for n, p in model.named_parameters() if "weight" in n))
    plain_optimizer = adam(p for n, p in reference.named_parameters() if "weight" in n)
    for step in range(2):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


def test_a_closure_is_called_once_with_grad_and_its_loss_returned() -> None:
    both = pairs()
    losses = []
    for model, optimizer in both:
        calls = []

        def closure(model: Any = model, optimizer: Any = optimizer, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = loss_of(model, len(calls))
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).detach() for _ in range(3)])
        assert len(calls) == 3
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert_same_models(both)


def _make(kind: type[torch.optim.Optimizer], parameters: Any, variant: int) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 1e-2, "foreach": False}
    name = kind.__name__
    if variant and name != "Rprop":
        options["weight_decay"] = 0.1
    if variant and name in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    if variant and name in ("Adam", "AdamW"):
        options["amsgrad"] = True
    if variant and name == "RMSprop":
        options["centered"] = True
    if variant and name == "SGD":
        options["nesterov"] = True
    return kind(parameters, **options)


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("kind", TESTED, ids=lambda kind: kind.__name__)
def test_every_tested_optimizer_has_the_plain_ones_bits(kind: type[torch.optim.Optimizer], variant: int) -> None:
    for place in ("smallest", "cuda"):
        model, reference = wrap(place), build()
        optimizer = ShardedOptimizer(model, _make(kind, model.parameters(), variant))
        plain_optimizer = _make(kind, reference.parameters(), variant)
        for step in range(4):
            train_step(model, optimizer, step)
            train_step(reference, plain_optimizer, step)
            assert_same(weights_of(model), weights_of(reference))
        mine, theirs = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
        assert mine.keys() == theirs.keys()
        for number, entry in theirs.items():
            assert mine[number].keys() >= {name for name, value in entry.items() if value is not None}
            for name, value in entry.items():
                if value is not None:
                    assert torch.equal(torch.as_tensor(mine[number][name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("kind", [HybridAdam, CPUAdam])
@pytest.mark.parametrize("option", ["adamw_mode", "bias_correction", "maximize"])
def test_the_switches_of_our_adam(kind: type[HybridAdam], option: str) -> None:
    switch = {option: option == "maximize"}
    model, reference = wrap(), build()
    optimizer = ShardedOptimizer(model, kind(model.parameters(), weight_decay=0.1, **switch))
    plain_optimizer = kind(reference.parameters(), weight_decay=0.1, **switch)
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


# ---- frozen, evaluation, several models, several backwards -----------------------------------------------------


@everywhere
def test_frozen_parameters_stay_and_have_no_state(place: str) -> None:
    class Partly(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].requires_grad_(False)
            self.layers[3].weight.requires_grad_(False)

    model, reference = wrap(place, make=Partly), build(Partly)
    optimizer, plain_optimizer = (adam(p for p in m.parameters() if p.requires_grad) for m in (model, reference))
    wrapped = ShardedOptimizer(model, optimizer)
    for step in range(3):
        train_step(model, wrapped, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))
    assert torch.equal(model.state_dict()["layers.0.weight"], build().layers[0].weight)
    assert len(wrapped.state_dict()["state"]) == 2 * LAYERS - 3
    assert layer_of(model, 3).weight.grad is None


@everywhere
def test_freezing_after_wrapping_stops_a_parameter_and_unfreezing_goes_on_with_its_moments(place: str) -> None:
    both = pairs(place)
    for model, optimizer in both:
        for step, trains in enumerate([True, False, True]):
            weight = layer_of(model, 1).weight
            weight.requires_grad_(trains)
            train_step(model, optimizer, step)
    assert_same_models(both)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_dtypes
@everywhere
def test_evaluation_first_and_between_steps(place: str, mode: Any, dtype: torch.dtype | None) -> None:
    both = pairs(place, dtype)
    outputs: list[list[Tensor]] = []
    for model, optimizer in both:
        its = []
        for step in range(3):
            model.eval()
            with mode():
                its += [model(inputs(50 + step, dtype)).clone(), layer_of(model, 2).weight.sum().clone()]
            model.train()
            train_step(model, optimizer, step, dtype)
        outputs.append(its)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*outputs))
    assert_same_models(both)


def test_evaluation_between_forward_and_backward() -> None:
    both = pairs()
    for model, optimizer in both:
        for step in range(2):
            loss = loss_of(model, step)
            with torch.no_grad():
                model(inputs(9))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_models(both)


@pytest.mark.parametrize("order", ["one_after_the_other", "interleaved", "chained"])
def test_several_models_in_one_process(order: str) -> None:
    def run(kinds: list[list[tuple[Any, Any]]], which: int) -> list[Any]:
        (first, first_optimizer), (second, second_optimizer) = (kinds[i][which] for i in (0, 1))
        for step in range(3):
            if order == "one_after_the_other":
                train_step(first, first_optimizer, step)
                train_step(second, second_optimizer, step + 10)
            elif order == "interleaved":
                losses = loss_of(first, step), loss_of(second, step + 10)
                for loss in losses:
                    loss.backward()
                first_optimizer.step()
                second_optimizer.step()
                first_optimizer.zero_grad()
                second_optimizer.zero_grad()
            else:
                second(first(inputs(step))).square().mean().backward()
                for optimizer in (first_optimizer, second_optimizer):
                    optimizer.step()
                    optimizer.zero_grad()
        return [weights_of(first), weights_of(second)]

    kinds = [pairs("smallest"), pairs("auto")]
    for mine, theirs in zip(run(kinds, 0), run(kinds, 1)):
        assert_same(mine, theirs)


@both_dtypes
@everywhere
def test_backward_twice_with_retain_graph(place: str, dtype: torch.dtype | None) -> None:
    both = pairs(place, dtype)
    for model, optimizer in both:
        for step in range(2):
            loss = loss_of(model, step, dtype)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if dtype is None:
        assert_same_models(both)
    else:  # plain bf16 rounds the sum to bf16; here it is made in fp32
        (model, _), (reference, _) = both
        for mine, theirs in zip(weights_of(model).values(), weights_of(reference).values()):
            assert torch.allclose(mine.float(), theirs.float(), rtol=2**-6, atol=2e-3)


def test_a_second_backward_without_retain_graph_is_torchs_error() -> None:
    model, optimizer = sharded()
    loss = loss_of(model)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"retain_graph|second time"):
        loss.backward()
    optimizer.zero_grad()
    train_step(model, optimizer)
    reference, plain_optimizer = plain()
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


def test_two_losses_of_one_forward_and_a_forward_without_backward() -> None:
    both = pairs()
    for model, optimizer in both:
        loss_of(model, 5)  # dropped
        output = model(inputs(0))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        train_step(model, optimizer, 1)
    assert_same_models(both)


def test_autograd_grad_of_inputs_leaves_the_parameters_alone() -> None:
    model, reference = wrap(), build()
    grads = []
    for m in (model, reference):
        x = inputs(0).requires_grad_()
        grads += torch.autograd.grad(m(x).square().sum(), x)
    assert torch.equal(*grads)
    assert all(p.grad is None for p in model.parameters())


def test_a_forward_that_raises_leaves_the_model_usable() -> None:
    both = pairs()
    for model, optimizer in both:
        train_step(model, optimizer, 0)
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 3))
        train_step(model, optimizer, 1)
    assert_same_models(both)


def test_a_backward_that_raises_leaves_the_model_usable() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("not today")

    class Failing(Mlp):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = x + torch.tanh(layer(x))
                if self.fails and number == 2:
                    x = Fails.apply(x)
            return x

    both = pairs(make=Failing)
    for model, optimizer in both:
        inner = model.module if isinstance(model, ShardedModel) else model
        train_step(model, optimizer, 0)
        inner.fails = True
        with pytest.raises(ValueError, match="not today"):
            loss_of(model, 1).backward()
        inner.fails = False
        optimizer.zero_grad()
        train_step(model, optimizer, 2)
    assert_same_models(both)


@both_dtypes
@everywhere
def test_no_sync_changes_nothing_at_one_rank(place: str, dtype: torch.dtype | None) -> None:
    hashes = []
    for inside in (False, True):
        model, optimizer = sharded(place, dtype=dtype)
        for step in range(2):
            for micro in range(3):
                if inside and micro < 2:
                    with model.no_sync():
                        (loss_of(model, 10 * step + micro, dtype) / 3).backward()
                else:
                    (loss_of(model, 10 * step + micro, dtype) / 3).backward()
            optimizer.step()
        hashes.append(state_hash(model, optimizer))
    assert hashes[0] == hashes[1]


# ---- the module's own face -------------------------------------------------------------------------------------


def test_names_and_state_dict_keys_are_the_plain_modules() -> None:
    class Parts(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("hidden", torch.ones(2), persistent=False)
            self.tied = nn.Linear(WIDTH, WIDTH)
            self.tied.weight = self.layers[0].weight

    model, reference = wrap(make=Parts), build(Parts)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == [
        n for n, _ in reference.named_parameters(remove_duplicate=False)
    ]
    assert [n for n, _ in model.named_parameters("a")] == [n for n, _ in reference.named_parameters("a")]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in reference.named_buffers()]
    assert [p.shape for p in model.parameters()] == [p.shape for p in reference.parameters()]
    assert list(model.state_dict()) == list(reference.state_dict())
    assert list(model.state_dict(prefix="a.")) == list(reference.state_dict(prefix="a."))
    assert_same(weights_of(model), weights_of(reference))
    state = model.state_dict()
    assert state["tied.weight"].data_ptr() == state["layers.0.weight"].data_ptr()


def test_a_hugging_face_model_keeps_its_attributes_and_generates() -> None:
    from tests.hf_models import gpt2

    def make() -> nn.Module:
        return gpt2().model

    model, reference = wrap(make=make, chunk_size=16384), build(make)
    assert model.config.n_layer == 4
    assert model.config is model.module.config
    assert isinstance(model, nn.Module)
    with pytest.raises(AttributeError, match="no_such_thing"):
        model.no_such_thing  # noqa: B018
    tokens = torch.arange(5).view(1, 5)
    model.eval(), reference.eval()
    wanted, got = (m.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (reference, model))
    assert torch.equal(got, wanted)
    assert model.get_input_embeddings().weight.shape == (256, 64)
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters() == model.num_parameters()
    assert_same(weights_of(model), weights_of(reference))


def test_an_attribute_error_inside_the_module_is_not_swallowed() -> None:
    class Broken(Mlp):
        @property
        def broken(self) -> int:
            return self.missing_thing  # type: ignore[return-value]

    with pytest.raises(AttributeError, match=r"missing_thing|broken"):
        wrap(make=Broken).broken  # noqa: B018


def test_train_and_eval_reach_the_module() -> None:
    model = wrap()
    assert model.training
    assert model.eval() is model
    assert not any(m.training for m in model.modules())
    assert all(m.training for m in model.train().modules())
    model.apply(lambda m: None)


def test_the_memory_report_tells_what_is_where() -> None:
    model, optimizer = sharded("smallest")
    for step in range(2):
        train_step(model, optimizer, step)
    report = model.memory_report()
    device, host = model._tiers
    for word in ("device", "host", "slots", "gradient slots", "param", "grad", "optim", "total", "peak"):
        assert word in report, word
    assert "policy auto" in report
    assert f"{LAYERS} chunks" in report
    assert f"{model.executor.fetcher.num_fetches} fetches" in report
    assert f"{model.executor.fetcher.num_evictions} evictions" in report
    assert "host->device" in report
    assert "device->host" in report
    assert device.ledger.peak_bytes <= model.plan.budget_bytes
    assert host.ledger.total_bytes > 0
    before = state_hash(model, optimizer)
    model.memory_report()
    assert state_hash(model, optimizer) == before
    assert "unlimited" in wrap("cuda").memory_report()


# ---- save, load, continue --------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize(("here", "there"), list(itertools.product(["smallest", "cuda"], ["auto", "cpu"])))
def test_saving_and_loading_continues_with_the_same_bits(here: str, there: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(here, dtype=dtype)
    scheduler = SCHEDULERS["one_cycle"](optimizer)
    for step in range(2):
        train_step(model, optimizer, step, dtype)
        scheduler.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    restored, restored_optimizer = sharded(there, dtype=dtype, chunk_size=2 * CHUNK_NUMEL)
    train_step(restored, restored_optimizer, 30, dtype)  # whatever it did before
    restored_scheduler = SCHEDULERS["one_cycle"](restored_optimizer)
    restored.load_state_dict(saved[0])
    restored_optimizer.load_state_dict(saved[1])
    restored_scheduler.load_state_dict(saved[2])
    assert state_hash(restored, restored_optimizer) == state_hash(model, optimizer)
    for step in range(2, 5):
        losses = []
        for m, its, schedule in (
            (model, optimizer, scheduler),
            (restored, restored_optimizer, restored_scheduler),
        ):
            losses.append(train_step(m, its, step, dtype))
            schedule.step()
        assert torch.equal(*losses)
    assert state_hash(restored, restored_optimizer) == state_hash(model, optimizer)


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_the_order_of_loading_model_and_optimizer_does_not_matter(optimizer_first: bool) -> None:
    model, optimizer = sharded(dtype=torch.bfloat16)
    for step in range(2):
        train_step(model, optimizer, step, torch.bfloat16)
    restored, restored_optimizer = sharded("cuda", dtype=torch.bfloat16)
    if optimizer_first:
        restored_optimizer.load_state_dict(optimizer.state_dict())
    restored.load_state_dict(model.state_dict())
    if not optimizer_first:
        restored_optimizer.load_state_dict(optimizer.state_dict())
    assert state_hash(restored, restored_optimizer) == state_hash(model, optimizer)


@pytest.mark.parametrize("kind", TESTED, ids=lambda kind: kind.__name__)
def test_every_tested_optimizer_continues_after_loading(kind: type[torch.optim.Optimizer]) -> None:
    model, reference = wrap(), build()
    optimizer = ShardedOptimizer(model, _make(kind, model.parameters(), 1))
    plain_optimizer = _make(kind, reference.parameters(), 1)
    for step in range(2):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    restored = wrap("cpu", chunk_size=2 * CHUNK_NUMEL)
    restored_optimizer = ShardedOptimizer(restored, _make(kind, restored.parameters(), 1))
    restored.load_state_dict(model.state_dict())
    restored_optimizer.load_state_dict(optimizer.state_dict())
    for step in range(2, 4):
        train_step(restored, restored_optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(restored), weights_of(reference))


@pytest.mark.parametrize("plain_kind", ["adamw", "hybrid_adam"])
def test_a_plain_optimizers_state_dict_loads_here(plain_kind: str) -> None:
    reference = build()
    parameters = reference.parameters()
    options = {"lr": 1e-2, "weight_decay": 0.01}
    plain_optimizer: Any = (
        torch.optim.AdamW(parameters, foreach=False, **options)
        if plain_kind == "adamw"
        else HybridAdam(parameters, **options)
    )
    for step in range(2):
        train_step(reference, plain_optimizer, step)
    model, optimizer = sharded()
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(plain_optimizer.state_dict())
    mine, theirs = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    for number, entry in theirs.items():
        for name, value in entry.items():
            assert torch.equal(mine[number][name], value), (number, name)
    continued = HybridAdam(reference.parameters(), **options)
    continued.load_state_dict(plain_optimizer.state_dict())
    for step in range(2, 4):
        train_step(model, optimizer, step)
        train_step(reference, continued, step)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize("plain_kind", [HybridAdam, torch.optim.AdamW])
def test_our_state_dict_loads_into_a_plain_optimizer(plain_kind: Any) -> None:
    model, optimizer = sharded()
    for step in range(2):
        train_step(model, optimizer, step)
    reference = build()
    reference.load_state_dict(model.state_dict())
    plain_optimizer = plain_kind(reference.parameters(), lr=1e-2, weight_decay=0.01)
    saved = optimizer.state_dict()
    plain_optimizer.load_state_dict({"state": saved["state"], "param_groups": saved["param_groups"]})
    for step in range(2, 4):
        mine = train_step(model, optimizer, step)
        theirs = train_step(reference, plain_optimizer, step)
        assert torch.allclose(mine, theirs, rtol=1e-5)
    if plain_kind is HybridAdam:
        assert_same(weights_of(model), weights_of(reference))


def test_a_state_dict_goes_through_a_file() -> None:
    model, optimizer = sharded(dtype=torch.bfloat16)
    train_step(model, optimizer, 0, torch.bfloat16)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    restored, restored_optimizer = sharded("cuda", dtype=torch.bfloat16)
    restored.load_state_dict(loaded["model"])
    restored_optimizer.load_state_dict(loaded["optimizer"])
    assert state_hash(restored, restored_optimizer) == state_hash(model, optimizer)


def test_the_state_hash_sees_bits_and_not_places() -> None:
    hashes = {place: state_hash(*sharded(place)) for place in PLACES}
    assert len(set(hashes.values())) == 1
    model, optimizer = sharded()
    assert state_hash(model) == state_hash(build())
    with torch.no_grad():
        layer_of(model, 0).bias[3] += 1e-7
    assert state_hash(model, optimizer) != hashes["smallest"]
