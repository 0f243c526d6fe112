"""Schedulers, param groups, closures and every tested optimizer do as in plain PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, UnsupportedError
from gemini.optimizer.elementwise import TESTED
from gemini.optimizer.shards import Run
from optim import CPUAdam, HybridAdam
from tests.zoo.mlp import (
    CHUNK_NUMEL,
    adam,
    assert_same,
    assert_same_models,
    build,
    everywhere,
    loss_of,
    pairs,
    plain,
    train_step,
    weights_of,
    wrap,
)
from tests.zoo.torch_optimizers import SCHEDULERS, make_torch_optimizer


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
    assert all(len(chunk.parameters) >= 2 for chunk in model.chunk_manager.chunks)
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("kind", TESTED, ids=lambda kind: kind.__name__)
def test_every_tested_optimizer_has_the_plain_ones_bits(kind: type[torch.optim.Optimizer], variant: int) -> None:
    for place in ("smallest", "cuda"):
        model, reference = wrap(place), build()
        optimizer = ShardedOptimizer(model, make_torch_optimizer(kind, model.parameters(), variant))
        plain_optimizer = make_torch_optimizer(kind, reference.parameters(), variant)
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


def test_an_update_of_no_elements_has_its_gradient_where_the_states_are() -> None:
    # Every step begins with one, and torch's optimizers refuse a gradient of the CPU beside states on a GPU. "meta" is
    # the other device that every machine has.
    model = wrap("cuda")
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(model.parameters()))
    train_step(model, optimizer)
    for state in optimizer._chunk_states.by_chunk.values():
        state.flats = {name: flat.to("meta") for name, flat in state.flats.items()}
        update = state.start(Run(0, 0, (0,), 0))
        assert {each.device.type for each in (update.grad, *update.flat.values())} == {"meta"}


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


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single, self.double_ = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.double_(self.single(x).double())  # type: ignore[no-any-return]


def test_fp64_weights_are_refused_before_hybrid_adam_has_updated_others() -> None:
    model = ShardedModel(TwoDtypes(), device="emulated")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 4)).sum())
        with pytest.raises(UnsupportedError, match="HybridAdam updates fp32 weights; this model has fp64 ones"):
            optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
