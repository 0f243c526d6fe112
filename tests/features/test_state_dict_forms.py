"""Optimizer state dicts of torch's optimizers, of other dtypes and of parameters without dimensions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import DivergenceError, RemoteRankError, ShardedModel, ShardedOptimizer, state_hash
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, adam, assert_same, build, loss_of, weights_of

Optimizer = type[torch.optim.Optimizer]


def step(module: nn.Module, optimizer: Any, seed: int) -> None:
    loss_of(module, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_state_of_torchs_adam_goes_on_as_adam_and_of_adamw_as_adamw(kind: Optimizer) -> None:
    """And back again: torch's Adam reads which of them it was."""
    plain, other = build(), build()
    first = kind(plain.parameters(), lr=1e-2, weight_decay=0.5, foreach=False)  # type: ignore[call-arg]
    step(plain, first, 0)
    other.load_state_dict(plain.state_dict())
    model = ShardedModel(other, device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.5))
    optimizer.load_state_dict(first.state_dict())
    for seed in (1, 2):
        step(plain, first, seed)
        step(model, optimizer, seed)
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=1e-5, atol=1e-6)  # other kernels
    is_adamw = kind is torch.optim.AdamW
    back = torch.optim.Adam(build().parameters())
    back.load_state_dict(optimizer.state_dict())
    assert back.param_groups[0]["decoupled_weight_decay"] is is_adamw


def test_a_momentum_buffer_that_is_none_is_made_by_the_next_step() -> None:
    model, plain = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL), build()
    optimizers: list[Any] = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    saved = optimizers[1].state_dict()
    saved["state"] = {number: {"momentum_buffer": None} for number in saved["param_groups"][0]["params"]}
    optimizers[0] = ShardedOptimizer(model, optimizers[0])
    optimizers[0].load_state_dict(saved)
    for seed in range(3):
        for module, optimizer in zip((model, plain), optimizers, strict=True):
            step(module, optimizer, seed)
    assert_same(weights_of(model), dict(plain.named_parameters()))


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp32_model_goes_on_from_the_masters_of_a_16_bit_one(rank: int, world_size: int, dtype: torch.dtype) -> None:
    source = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL, dtype=dtype)
    saving = ShardedOptimizer(source, adam(source.parameters()), initial_scale=16.0)
    for seed in range(2):
        saving.backward(loss_of(source, seed, dtype))
        saving.step()
    saved = saving.state_dict()
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL)
    model.load_state_dict(source.state_dict())
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    optimizer.load_state_dict(saved)
    found = list(weights_of(model).values())
    assert all(torch.equal(found[number], master) for number, master in saved["masters"].items())
    assert any(not torch.equal(master, master.to(dtype).float()) for master in saved["masters"].values())
    source.close()
    model.close()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam, torch.optim.AdamW])
def test_the_state_of_a_parameter_without_dimensions_is_loaded_as_it_was_saved(kind: Optimizer) -> None:
    def trained(reloads: bool) -> dict[str, Tensor]:
        model = ShardedModel(Scaled(), device="emulated")
        optimizer = ShardedOptimizer(model, kind(model.parameters(), lr=1e-2))  # type: ignore[call-arg]
        for seed in range(3):
            optimizer.backward((model(torch.ones(2, 4) * (seed + 1)) ** 2).sum())
            optimizer.step()
            if reloads:
                optimizer.load_state_dict(optimizer.state_dict())
        return weights_of(model)

    assert_same(trained(True), trained(False))


@on_ranks(2)
def test_ranks_that_load_other_optimizer_state_are_told(rank: int, world_size: int) -> None:
    """Each rank sets its part of every state: with another step count it would be updated otherwise."""
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    step(model, optimizer, rank)
    before = state_hash(model, optimizer)
    for change in (
        lambda saved: saved["state"].pop(3),
        lambda saved: saved["state"][3].update(step=torch.tensor(100.0)),
        lambda saved: saved["param_groups"][0].update(lr=torch.tensor(0.01).nextafter(torch.tensor(1.0))),
    ):
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = torch.tensor(0.01)
        if rank == 1:
            change(saved)
        with pytest.raises(DivergenceError, match="All ranks must load the same state dict"):
            optimizer.load_state_dict(saved)
        assert state_hash(model, optimizer) == before and optimizer.param_groups[0]["lr"] == 1e-2
    model.close()


def test_what_a_state_dict_may_not_have_is_refused_before_anything_is_set() -> None:
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    step(model, optimizer, 0)
    before = state_hash(model, optimizer)
    for change, complaint in (
        (
            lambda saved: saved["state"][3].update(step=torch.tensor(math.nan)),
            r"step of parameter 3 .* is not a number",
        ),
        (lambda saved: saved["state"][3].update(step=-1), r"step of parameter 3 .* is not a number"),
        (lambda saved: saved["param_groups"][0].update(lr=-1.0), "lr must be a finite number"),
        (lambda saved: saved["param_groups"][0].update(amsgrad=True), "amsgrad must be False"),
    ):
        saved = optimizer.state_dict()
        change(saved)
        with pytest.raises(ValueError, match=complaint):
            optimizer.load_state_dict(saved)
        assert state_hash(model, optimizer) == before and optimizer.param_groups[0]["lr"] == 1e-2


def test_a_learning_rate_that_was_loaded_is_the_optimizers_own() -> None:
    """A schedule writes to a tensor, which must not be that of the state dict."""
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(0.5)
    optimizer.load_state_dict(saved)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(model, optimizer, 0)
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert float(saved["param_groups"][0]["lr"]) == 0.5


def test_hooks_on_an_optimizers_state_dicts_run_as_in_plain_pytorch() -> None:
    model, plain = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL), build()
    ours: Any = ShardedOptimizer(model, adam(model.parameters()))
    told: dict[Any, list[str]] = {}
    for module, optimizer in ((model, ours), (plain, adam(plain.parameters()))):
        calls = told[optimizer] = []
        optimizer.register_state_dict_pre_hook(lambda _, its=calls: its.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "epoch": 7})
        optimizer.register_load_state_dict_pre_hook(lambda _, state, its=calls: its.append(str(state.pop("epoch"))))
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: {**state, "param_groups": [{**group, "lr": 0.5} for group in state["param_groups"]]}
        )
        optimizer.register_load_state_dict_post_hook(lambda _, its=calls: its.append("after loading"))
        step(module, optimizer, 0)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert saved["epoch"] == 7 and optimizer.param_groups[0]["lr"] == 0.5
    assert all(calls == ["before saving", "7", "after loading"] for calls in told.values())


@on_ranks(2)
@pytest.mark.parametrize("when", ["saving", "loading"])
def test_the_other_ranks_hear_of_a_hook_that_raises_before_an_optimizers_state(
    rank: int, world_size: int, when: str
) -> None:
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL, rank_timeout=10)
    optimizer: Any = ShardedOptimizer(model, adam(model.parameters()))
    step(model, optimizer, 0)
    saved = optimizer.state_dict()

    def fail(*_: Any) -> None:
        if rank == 1:
            raise ValueError("not today")

    register = {
        "saving": optimizer.register_state_dict_pre_hook,
        "loading": optimizer.register_load_state_dict_pre_hook,
    }
    handle = register[when](fail)
    with pytest.raises(ValueError if rank == 1 else RemoteRankError, match="not today"):
        optimizer.state_dict() if when == "saving" else optimizer.load_state_dict(saved)
    handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer, 1)
    model.close()
