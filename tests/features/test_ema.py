"""`ShardedOptimizer(..., ema=0.999)`: the average of the masters, with the bits of torch's `AveragedModel`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gemini
from gemini import GeminiError, ShardedModel, ShardedOptimizer, estimate_memory, state_hash
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import assert_same, minimum_bytes, weights_of
from tests.zoo.whole import Plain, build, loss_of, muon_and_adam, train_step

DECAY = 0.9
PLACES: dict[str, dict[str, Any]] = {
    "cuda": {"tensor_placement_policy": "cuda"},
    "cpu": {"tensor_placement_policy": "cpu"},
    "smallest": {"model_data_memory": "smallest"},
    "disk": {"tensor_placement_policy": "disk"},
}


def one_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [gemini.HybridAdam(model.parameters(), lr=1e-2)]


def one_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)]


MAKES: dict[str, Any] = {"adam": one_adam, "adamw": one_adamw, "muon": muon_and_adam}


def wrapped(place: str, folder: Path, module: nn.Module | None = None, **arguments: Any) -> ShardedModel:
    arguments = {"device": "emulated", "chunk_size": 2048, **PLACES[place], **arguments}
    if place == "disk":
        arguments["disk_path"] = folder
    if place == "smallest":
        del arguments["model_data_memory"]
        arguments["model_data_memory"] = minimum_bytes(build(), **arguments)
    return ShardedModel(build() if module is None else module, **arguments)


def sharded(model: ShardedModel, make: str, **arguments: Any) -> ShardedOptimizer:
    made = MAKES[make](model)
    return ShardedOptimizer(model, made if len(made) > 1 else made[0], **{"ema": DECAY, **arguments})


def plain(make: str, world_size: int) -> tuple[Plain, AveragedModel]:
    its = Plain("muon", world_size)
    its.optimizers = MAKES[make](its.model)
    return its, AveragedModel(its.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def average_of(model: ShardedModel, optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    assert optimizer.ema is not None
    with optimizer.ema.weights():
        return weights_of(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", MAKES)
@on_ranks(1, 2, soak=(3, 4))
def test_the_average_has_the_bits_of_torchs_and_the_weights_come_back(
    rank: int, world_size: int, make: str, place: str, stage: int, tmp_path: Path
) -> None:
    model = wrapped(place, tmp_path, stage=stage)
    optimizer = sharded(model, make)
    its, average = plain(make, world_size)
    for step in range(4):
        train_step(model, optimizer, rank, step)
        its.step(step)
        average.update_parameters(its.model)
        if step % 2:
            before = state_hash(model, optimizer)
            assert_same(average_of(model, optimizer), weights_of(average.module))
            assert state_hash(model, optimizer) == before
            assert_same(weights_of(model), weights_of(its.model))
    model.close()


@on_ranks(1, 2)
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_the_average_is_of_the_masters_of_16_bit_weights(
    rank: int, world_size: int, place: str, tmp_path: Path
) -> None:
    model = wrapped(place, tmp_path, build(torch.bfloat16))
    optimizer = sharded(model, "adam")
    wanted: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.backward(loss_of(model, step, dtype=torch.bfloat16))
        optimizer.step()
        masters = {name: gemini.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        for name, master in masters.items():
            assert master is not None
            wanted[name] = wanted[name].lerp(master, 1 - DECAY) if name in wanted else master.clone()
    before = state_hash(model, optimizer)
    assert optimizer.ema is not None
    with optimizer.ema.weights():
        for name, parameter in model.named_parameters():
            found = gemini.safe_get_full_fp32_param(parameter)
            assert found is not None and torch.equal(found, wanted[name]), name
    assert state_hash(model, optimizer) == before
    model.close()


@on_ranks(1, 2)
@pytest.mark.parametrize("make", ["adam", "muon"])
def test_a_checkpoint_and_a_state_dict_have_the_average(rank: int, world_size: int, make: str, tmp_path: Path) -> None:
    model = wrapped("cuda", tmp_path)
    optimizer = sharded(model, make)
    its, average = plain(make, world_size)
    for step in range(2):
        train_step(model, optimizer, rank, step)
        its.step(step)
        average.update_parameters(its.model)
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    saved, weights = copy.deepcopy(optimizer.state_dict()), weights_of(model)
    model.close()
    resumed = []
    for by_file in (True, False):
        other = wrapped("cpu", tmp_path, stage=1)
        again = sharded(other, make)
        if by_file:
            gemini.load_checkpoint(tmp_path / "saved", other, again)
        else:
            other.load_state_dict(weights)
            again.load_state_dict(saved)
        resumed.append((other, again))
    its.step(2)
    average.update_parameters(its.model)
    for other, again in resumed:
        train_step(other, again, rank, 2)
        assert_same(average_of(other, again), weights_of(average.module))
        other.close()


@on_ranks(1, 2)
def test_a_parameter_without_a_gradient_is_averaged_and_a_skipped_step_is_not(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
            return self.second(self.first(x)) if both else self.first(x)

    torch.manual_seed(1)
    module = Halves()
    reference = copy.deepcopy(module)
    average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    model = wrapped("cpu", tmp_path, module)
    optimizer, its = sharded(model, "adam"), one_adam(reference)[0]
    x = torch.ones(2, 24)
    for step in range(4):
        both = step < 2
        for each, stepped in ((model, optimizer), (reference, its)):
            each(x, both).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
        average.update_parameters(reference)
    assert_same(average_of(model, optimizer), weights_of(average.module))
    before = state_hash(model, optimizer)
    (model(x).mean() * float("inf")).backward()
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    assert state_hash(model, optimizer) == before
    model.close()


@on_ranks(1, 2)
def test_inside_weights_a_step_a_state_dict_and_a_checkpoint_are_refused(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model = wrapped("cuda", tmp_path)
    optimizer = sharded(model, "adam")
    assert optimizer.ema is not None
    train_step(model, optimizer, rank, 0)
    before = state_hash(model, optimizer)
    with optimizer.ema.weights():
        with torch.no_grad():
            loss_of(model, 1)
        for call in (
            optimizer.step,
            optimizer.state_dict,
            lambda: gemini.save_checkpoint(tmp_path, model, optimizer),
            lambda: optimizer.ema.weights().__enter__(),
        ):
            with pytest.raises(GeminiError, match=r"inside optimizer\.ema\.weights\(\)"):
                call()
    assert state_hash(model, optimizer) == before
    loss_of(model, 1, 0, rank).backward()
    with pytest.raises(GeminiError, match=r"between backward\(\) and step\(\)"), optimizer.ema.weights():
        pass
    optimizer.step()
    assert len(set(gathered(state_hash(model, optimizer)))) == 1
    model.close()


def test_a_decay_that_is_none_is_refused_and_without_one_there_is_no_average(tmp_path: Path) -> None:
    model = wrapped("cuda", tmp_path)
    for wrong in (True, 1.5, -0.1, "0.9"):
        with pytest.raises(ValueError, match="ema must be the decay of an average, from 0 to 1"):
            ShardedOptimizer(model, gemini.HybridAdam(model.parameters()), ema=wrong)  # type: ignore[arg-type]
    assert ShardedOptimizer(model, gemini.HybridAdam(model.parameters())).ema is None
    model.close()


def test_the_average_takes_four_bytes_an_element_in_the_plan(tmp_path: Path) -> None:
    held = []
    for ema in (None, DECAY):
        model = wrapped("cpu", tmp_path)
        optimizer = sharded(model, "adam", ema=ema)
        train_step(model, optimizer, 0, 0)
        numel = sum(chunk.optim_numel for chunk in model.chunk_manager.chunks)
        planned = model.plan.placement.bytes_by_kind(model.plan.demand, gemini.Tier.HOST)[gemini.Kind.OPTIM]
        assert planned == model.chunk_manager.memory.host.ledger.bytes_by_kind[gemini.Kind.OPTIM]
        held.append(planned)
        model.close()
    assert held[1] - held[0] == 4 * numel
    estimate = estimate_memory(
        build(), chunk_size=2048, tensor_placement_policy="cpu", optim_states=3, device="emulated"
    )
    assert estimate.host[gemini.Kind.OPTIM] == held[1]


@on_ranks(1, 2)
def test_the_average_waits_for_updates_beside_the_next_forward(rank: int, world_size: int, tmp_path: Path) -> None:
    model = wrapped("cpu", tmp_path, deferred_update=True)
    optimizer = sharded(model, "adam")
    its, average = plain("adam", world_size)
    for step in range(3):
        train_step(model, optimizer, rank, step)
        its.step(step)
        average.update_parameters(its.model)
    assert_same(average_of(model, optimizer), weights_of(average.module))
    assert_same(weights_of(model), weights_of(its.model))
    model.close()
