"""`HybridAdam(state_dtype=)`: moments of 8 and 16 bits under a `ShardedOptimizer`, the same bits wherever they rest."""

from __future__ import annotations

import math
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import (
    HybridAdam,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    estimate_memory,
    load_checkpoint,
    safe_get_full_optimizer_state,
    save_checkpoint,
)
from gemini.checkpoint.outgoing import export_universal
from gemini.engine.config import load_config
from gemini.placement.demand import Kind, Tier
from optim import EIGHT_BIT
from tests.harness.on_ranks import gathered, in_soak, on_ranks

STEPS = 4
KINDS: list[Any] = ["8bit", torch.bfloat16]


class Small(nn.Module):
    """Matrices whose elements fill no whole blocks, tensors too small for 8 bits, an embedding, a stranger order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(90, 67)
        self.first = nn.Linear(67, 81)
        self.norm = nn.LayerNorm(81)
        self.second = nn.Linear(81, 67)
        self.third = nn.Linear(67, 90, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.second(torch.tanh(self.norm(self.first(x))))
        return self.third(x)


def build(dtype: torch.dtype | None = None) -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model if dtype is None else model.to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(90, (4, 9), generator=generator)
    # A scaled loss, so that moments of layers differ by orders of magnitude.
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()) * 3.7


def shared_folder(rank: int) -> str:
    """A new folder, the same one on all ranks; it is in the system's own for temporary files."""
    return gathered(tempfile.mkdtemp() if rank == 0 else "")[0]


def adam(model: Any, kind: Any, embeddings: bool = False) -> HybridAdam:
    """embeddings: say it, because a plain optimizer sees no module."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    if embeddings:
        groups[0]["optim_bits"] = 32
    return HybridAdam(groups, lr=1e-2, weight_decay=0.01, state_dtype=kind)


def train(model: Any, optimizer: Any, steps: int = STEPS, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, step)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def outcome(model: Any, optimizer: Any) -> dict[str, Any]:
    """Weights and states, by name."""
    found: dict[str, Any] = {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    for number, entry in saved["state"].items():
        found |= {f"{name} {number}": value for name, value in entry.items() if name != "master"}
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@cache
def expected(kind: Any, dtype: torch.dtype | None, steps: int = STEPS) -> tuple[list[float], dict[str, Any]]:
    model = build(dtype)
    optimizer = adam(model, kind, embeddings=kind == "8bit")
    return train(model, optimizer, steps), outcome(model, optimizer)


PLACES: dict[str, dict[str, Any]] = {
    "device": {"stage": 3},
    "host, stage 1": {"stage": 1, "tensor_placement_policy": "cpu"},
    "host, deferred": {"stage": 3, "tensor_placement_policy": "cpu", "deferred_update": True, "chunk_size": 6144},
    "budget": {"stage": 2, "model_data_memory": "200KB", "chunk_size": 8192},
    "disk": {"stage": 3, "tensor_placement_policy": "disk", "chunk_size": 8192},
    "in backward": {"stage": 3, "update_in_backward": True, "chunk_size": 8192},
}
MORE: dict[str, dict[str, Any]] = {
    f"stage {stage}, {size}, {policy}, {deferred}": {
        "stage": stage,
        "chunk_size": size,
        "tensor_placement_policy": policy,
        "deferred_update": deferred,
    }
    for stage in (0, 1, 2, 3)
    for size in (None, 6144, 30_000)
    for policy in ("cpu", "cuda", "disk")
    for deferred in (False, True)
}


def wrapped(model: nn.Module, place: str, folder: str, **others: Any) -> ShardedModel:
    options = {**PLACES, **MORE}[place] | others
    if options.get("tensor_placement_policy") == "disk":
        options = {**options, "disk_path": folder}
    return ShardedModel(model, device="emulated", **options)


@on_ranks(1, 2, soak=(4,))
@pytest.mark.parametrize("place", [*PLACES, *in_soak(*MORE)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_training_has_the_bits_of_the_plain_optimizer(rank: int, world_size: int, kind: Any, place: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        for dtype in (None, torch.bfloat16) if kind == "8bit" else (torch.bfloat16,):
            model = wrapped(build(dtype), place, path)
            optimizer = ShardedOptimizer(model, adam(model, kind))
            losses, its = expected(kind, dtype)
            assert train(model, optimizer) == losses
            assert_same(outcome(model, optimizer), its)
            model.close()


@on_ranks(1, 2, soak=(4,))
@pytest.mark.parametrize("place", ["host, deferred", "in backward", *in_soak(*PLACES, *MORE)])
def test_stochastic_rounding_draws_the_same_numbers_anywhere(rank: int, world_size: int, place: str) -> None:
    path = shared_folder(rank)
    losses, its = expected("bf16_stochastic", torch.bfloat16)
    assert losses != expected(torch.bfloat16, torch.bfloat16)[0]
    with tempfile.TemporaryDirectory() as folder:
        model = wrapped(build(torch.bfloat16), place, folder)
        optimizer = ShardedOptimizer(model, adam(model, "bf16_stochastic"))
        assert train(model, optimizer, 2) == losses[:2]
        save_checkpoint(path, model, optimizer)
        model.close()
        # Elsewhere, with a chunk size of its own.
        model = ShardedModel(build(torch.bfloat16), device="emulated", stage=2, chunk_size=30_000)
        optimizer = ShardedOptimizer(model, adam(model, "bf16_stochastic"))
        load_checkpoint(path, model, optimizer)
        assert train(model, optimizer, STEPS - 2, start=2) == losses[2:]
        assert_same(outcome(model, optimizer), its)
        model.close()


@on_ranks(1, 2)
def test_embeddings_and_small_tensors_stay_in_32_bits_unless_a_group_says_otherwise(rank: int, world_size: int) -> None:
    for bits, whose in ((None, {"first.weight", "second.weight", "third.weight"}), (8, {"table.weight"}), (32, set())):
        model = ShardedModel(build(), device="emulated", stage=3)
        named = dict(model.named_parameters())
        groups: list[dict[str, Any]] = [{"params": list(named.values())}]
        if bits == 8:
            groups = [
                {"params": [named.pop("table.weight")], "optim_bits": 8},
                {"params": named.values(), "optim_bits": 32},
            ]
        elif bits == 32:
            groups[0]["optim_bits"] = 32
        optimizer = ShardedOptimizer(model, HybridAdam(groups, state_dtype="8bit"))
        train(model, optimizer, 1)
        found = set()
        for name, parameter in model.named_parameters():
            value = safe_get_full_optimizer_state(parameter, "exp_avg_sq")
            assert value is not None and value.dtype is torch.float32
            flat, codes, scales = (
                value.flatten(),
                torch.empty(value.numel(), dtype=torch.uint8),
                torch.empty(-(-value.numel() // 256)),
            )
            EIGHT_BIT.write(codes, scales, "exp_avg_sq", flat)
            if torch.equal(EIGHT_BIT.read(codes, scales, "exp_avg_sq"), flat):
                found.add(name)
        assert found == whose
        model.close()


def test_settings_that_mean_nothing_are_refused_by_name() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match=r"torch\.bfloat16, 'bf16_stochastic' or '8bit', found '4bit'"):
        HybridAdam(parameters, state_dtype="4bit")
    with pytest.raises(ValueError, match="optim_bits must be 8, 32 or None, found 16"):
        HybridAdam([{"params": parameters, "optim_bits": 16}])
    model = ShardedModel(build(), device="emulated")
    optimizer = ShardedOptimizer(model, adam(model, "8bit"))
    train(model, optimizer, 1)
    optimizer.param_groups[1]["optim_bits"] = 32
    with pytest.raises(UnsupportedError, match=r"optim_bits of .* was changed"):
        train(model, optimizer, 1)
    del optimizer.param_groups[1]["optim_bits"]
    train(model, optimizer, 1)


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_checkpoint_keeps_the_bytes_and_goes_on_anywhere(rank: int, world_size: int, kind: Any) -> None:
    path = shared_folder(rank)
    model = ShardedModel(build(torch.bfloat16), device="emulated", stage=3, chunk_size=8192)
    optimizer = ShardedOptimizer(model, adam(model, kind))
    train(model, optimizer, 2)
    saved = save_checkpoint(path, model, optimizer)
    if rank == 0:
        stored = sum(each.stat().st_size for each in saved.glob("*.safetensors"))
        numel = sum(parameter.numel() for parameter in build().parameters())
        table = 90 * 67
        # fp32 masters, and both moments; the embedding's are fp32.
        wanted = 4 * numel + (4 * numel if kind != "8bit" else 2.04 * (numel - table) + 8 * table)
        assert stored < wanted + 20_000
    model.close()
    losses, its = expected(kind, torch.bfloat16)
    for options in ({"stage": 0}, {"stage": 2, "tensor_placement_policy": "cpu", "chunk_size": 30_000}):
        model = ShardedModel(build(torch.bfloat16), device="emulated", **options)
        optimizer = ShardedOptimizer(model, adam(model, kind))
        load_checkpoint(path, model, optimizer)
        assert train(model, optimizer, STEPS - 2, start=2) == losses[2:]
        assert_same(outcome(model, optimizer), its)
        model.close()


@on_ranks(1, 2)
def test_states_go_between_formats_through_checkpoints_and_state_dicts(rank: int, world_size: int) -> None:
    path = shared_folder(rank)
    model = ShardedModel(build(), device="emulated", stage=3, chunk_size=8192)
    optimizer = ShardedOptimizer(model, adam(model, "8bit"))
    train(model, optimizer, 2)
    states = outcome(model, optimizer)
    saved = optimizer.state_dict()
    save_checkpoint(path, model, optimizer)
    model.close()
    # The values of 8 bits are values of fp32, and those of fp32 become the same bytes again.
    wide = ShardedModel(build(), device="emulated", stage=1)
    its = ShardedOptimizer(wide, adam(wide, None))
    load_checkpoint(path, wide, its)
    assert_same(outcome(wide, its), states)
    folder = shared_folder(rank)
    save_checkpoint(folder, wide, its)
    wide.close()
    small = ShardedModel(build(), device="emulated", stage=3)
    its = ShardedOptimizer(small, adam(small, "8bit"))
    load_checkpoint(folder, small, its)
    assert_same(outcome(small, its), states)
    its.load_state_dict(saved)
    assert_same(outcome(small, its), states)
    small.close()


def test_a_checkpoint_of_8_bits_is_exported_in_fp32(tmp_path: Path) -> None:
    model = ShardedModel(build(), device="emulated")
    optimizer = ShardedOptimizer(model, adam(model, "8bit"))
    train(model, optimizer, 2)
    save_checkpoint(tmp_path / "own", model, optimizer)
    name = "first.weight"
    parameter = dict(model.named_parameters())[name]
    value = safe_get_full_optimizer_state(parameter, "exp_avg")
    folder = export_universal(tmp_path / "own", tmp_path / "theirs")
    (found,) = folder.rglob(f"{name}/exp_avg.pt")
    theirs = torch.load(found)
    theirs = theirs["param"] if isinstance(theirs, dict) else theirs
    assert value is not None and torch.equal(theirs, value.cpu())


class Wide(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(
    ("kind", "held", "freed"), [("8bit", 8.15, 6.15), (torch.bfloat16, 10.1, 8.1), (None, 14.1, 12.1)], ids=str
)
def test_bytes_of_a_parameter_by_slope_are_those_that_the_plan_counts(kind: Any, held: float, freed: float) -> None:
    for frees, most in ((False, held), (True, freed)):
        found = []
        for layers in (8, 24):
            options: dict[str, Any] = {"dtype": torch.bfloat16, "chunk_size": 65536, "tensor_placement_policy": "cpu"}
            model = ShardedModel(Wide(layers), device="emulated", update_in_backward=frees, **options)
            optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), state_dtype=kind))
            for _ in range(2):
                model(torch.ones(4, 256, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            host = model.chunk_manager.memory.host.ledger.bytes_by_kind
            held_here = sum(host[kind] for kind in Kind)
            planned = model.plan.placement.bytes_by_kind(model.plan.demand, Tier.HOST)
            assert held_here == sum(planned[kind] for kind in Kind)
            found.append(held_here)
            model.close()
        assert (found[1] - found[0]) / (16 * 65536) <= most


@pytest.mark.parametrize("optimizer", ["8bit", "bf16", "adam"])
def test_an_estimate_counts_the_bytes_of_small_states(optimizer: str) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "stage": 3}
    estimated = estimate_memory(build(), optimizer=optimizer, **options).state_bytes
    model = ShardedModel(build(), device="emulated", **options)
    kind = None if optimizer == "adam" else optimizer
    ShardedOptimizer(model, HybridAdam(model.parameters(), state_dtype=kind))
    counts = [model.plan.placement.bytes_by_kind(model.plan.demand, tier) for tier in Tier]
    assert abs(estimated / sum(count[kind] for count in counts for kind in Kind) - 1) < 0.03
    model.close()
    with pytest.raises(ValueError, match="optimizer must be one of adam, 8bit, bf16, sgd, found 'lion'"):
        estimate_memory(build(), optimizer="lion")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = ShardedModel(build(), device="emulated")
    optimizer = ShardedOptimizer(model, adam(model, "8bit"))
    train(model, optimizer, 1)
    before = outcome(model, optimizer)
    (loss_of(model, 1) * bad).backward()
    with pytest.warns(UserWarning, match="skipped on all ranks"):
        optimizer.step()
    assert_same(outcome(model, optimizer), before)


class Poisoned(nn.Module):
    """Two matrices, of which one element of the first one's gradient is NaN, if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(80, 80, bias=False), nn.Linear(80, 80, bias=False)

    def forward(self, x: Tensor, bad: float = 0.0) -> Tensor:
        weight = self.first.weight
        return self.second(x @ weight).square().mean() + weight[3, 7].detach().mul(bad).mul(weight[3, 7])


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["8bit", torch.bfloat16, None], ids=str)
def test_a_nan_in_a_backward_that_updates_costs_its_own_element(rank: int, world_size: int, kind: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        module = Poisoned()
    model = ShardedModel(module, device="emulated", update_in_backward=True, chunk_size=6400)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2, state_dtype=kind))
    x = torch.ones(4, 80)
    for bad in (0.0, math.nan):
        model(x, bad).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    assert model.state_dict()["first.weight"].isnan().nonzero().tolist() == [[3, 7]]
    # The user mends the weight, and trains on. fp32 and bf16 keep moments that are NaN.
    with torch.no_grad():
        model.module.first.weight[3, 7] = 0.0
    model(x).backward()
    optimizer.step()
    found = model.state_dict()
    assert found["first.weight"].isnan().nonzero().tolist() == ([] if kind == "8bit" else [[3, 7]])
    assert not found["second.weight"].isnan().any()
    model.close()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(9, 17, 3), nn.Conv2d(17, 31, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_channels_last_weight_has_the_blocks_of_the_plain_one(rank: int, world_size: int, kind: Any) -> None:
    found = []
    for sharded in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            module = Images().to(memory_format=torch.channels_last)
        model: Any = ShardedModel(module, device="emulated", stage=3) if sharded else module
        plain = HybridAdam(model.parameters(), lr=1e-2, state_dtype=kind)
        optimizer: Any = ShardedOptimizer(model, plain) if sharded else plain
        for step in range(3):
            x = torch.randn(2, 9, 8, 8, generator=torch.Generator().manual_seed(step))
            model(x.to(memory_format=torch.channels_last)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(outcome(model, optimizer))
        if sharded:
            model.close()
    assert_same(found[1], found[0])


def test_a_plain_model_whose_memory_format_changes_keeps_its_small_moments() -> None:
    torch.manual_seed(2)
    model = Images()
    optimizer = HybridAdam(model.parameters(), lr=1e-2, state_dtype="8bit")
    x = torch.randn(2, 9, 8, 8)
    model(x).backward()
    optimizer.step()
    before = optimizer.state_dict()["state"][2]["exp_avg"].clone()
    model.to(memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = optimizer.state_dict()["state"][2]["exp_avg"]
    # Blocks hold other elements now, so moments are rounded once more.
    assert ((after - 0.9 * before).abs() <= 0.01 * before.abs().max()).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_loss_is_that_of_fp32_states_within_half_a_percent(kind: Any) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(90, (64, 9))
    ends = {}
    for each in (None, kind):
        model = build()
        optimizer = HybridAdam(model.parameters(), lr=1e-3, state_dtype=each)
        losses = []
        for step in range(150):
            rows = tokens[step * 16 % 64 :][:16]
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends[each] = sum(losses[-20:]) / 20
    assert ends[kind] == pytest.approx(ends[None], rel=5e-3)


def test_configs_name_small_states_as_other_libraries_do() -> None:
    config = load_config(
        {
            "train_batch_size": 4,
            "bf16": {"enabled": True, "bf16_optimizer_states": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
        }
    )
    assert config.optimizer is not None and config.optimizer.params["state_dtype"] == "bf16"


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"])
def test_the_trainer_of_transformers_trains_with_small_states_under_their_names(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from gemini.integrations.transformers import in_eight_bits

    args = transformers.TrainingArguments(output_dir=str(tmp_path), optim=name, learning_rate=3e-4, use_cpu=True)
    found = in_eight_bits(args)
    assert found is not None
    kind, arguments = found
    assert kind([nn.Parameter(torch.zeros(1))], **arguments).state_format.name == "8bit"
    assert arguments["lr"] == 3e-4
    assert in_eight_bits(transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)) is None
