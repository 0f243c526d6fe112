"""Several optimizers of one model: one norm, clip, loss scale, step, list of groups, and state dict."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gemini
from gemini import ShardedModel, ShardedOptimizer, UnsupportedError, state_hash
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import assert_same, weights_of
from tests.zoo.whole import Plain, build, loss_of, matrices_and_rest, muon_and_adam, train_step


def wrapped(**arguments: Any) -> ShardedModel:
    return ShardedModel(build(), **{"device": "emulated", "chunk_size": 2048, **arguments})


@on_ranks(1, 2)
def test_the_norm_and_the_clip_are_of_all_gradients_together(rank: int, world_size: int) -> None:
    model, plain = wrapped(), Plain("muon", world_size)
    optimizer = ShardedOptimizer(model, muon_and_adam(model))
    train_step(model, optimizer, rank, 0)
    plain.step(0)
    optimizer.backward(loss_of(model, 1, 0, rank))
    norm = optimizer.clip_grad_norm_(0.05)
    optimizer.step()
    parameters = list(plain.model.parameters())
    mean = plain._mean(parameters, 1, 0)
    for parameter, grad in zip(parameters, mean, strict=True):
        parameter.grad = grad
    assert torch.equal(gemini.clip_grad_norm_(parameters, 0.05), norm)
    for each in plain.optimizers:
        each.step()
    assert_same(weights_of(model), weights_of(plain.model))
    assert optimizer.last_step is not None and optimizer.last_step.number == 2
    model.close()


def test_groups_say_whose_they_are_and_are_one_list() -> None:
    model = wrapped()
    given = muon_and_adam(model)
    optimizer = ShardedOptimizer(model, given)
    assert [group["optimizer"] for group in optimizer.param_groups] == ["Muon", "HybridAdam"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 1e-2]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 5]
    assert [each.param_groups for each in given] == [[group] for group in optimizer.param_groups]
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    model.close()


@on_ranks(1, 2)
def test_a_schedule_of_one_of_them_drives_its_groups_alone(rank: int, world_size: int) -> None:
    model, plain = wrapped(), Plain("muon", world_size)
    given = muon_and_adam(model)
    optimizer = ShardedOptimizer(model, given)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (given[0], plain.optimizers[0])]
    for step in range(3):
        train_step(model, optimizer, rank, step)
        plain.step(step)
        for schedule in schedules:
            schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05 / 8, 1e-2]
    assert_same(weights_of(model), weights_of(plain.model))
    model.close()


@on_ranks(1, 2)
def test_a_schedule_of_all_drives_all_groups(rank: int, world_size: int) -> None:
    model = wrapped()
    optimizer = ShardedOptimizer(model, muon_and_adam(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train_step(model, optimizer, rank, 0)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.005]
    model.close()


@on_ranks(1, 2)
def test_two_of_one_class_have_states_and_settings_of_their_own(rank: int, world_size: int) -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = matrices_and_rest(model)
        adams = [torch.optim.AdamW, torch.optim.SGD]
        return [
            torch.optim.Muon(matrices[:1], lr=0.1),
            torch.optim.Muon(matrices[1:], lr=0.01, ns_steps=3),
            adams[0](rest[:2], lr=0.01, foreach=False),
            adams[1](rest[2:], lr=0.01, momentum=0.9, foreach=False),
        ]

    model, plain = wrapped(), Plain("muon", world_size)
    plain.optimizers = make(plain.model)
    optimizer = ShardedOptimizer(model, make(model))
    names = [group["optimizer"] for group in optimizer.param_groups]
    assert names == ["Muon", "Muon 2", "AdamW", "SGD"]
    for step in range(3):
        train_step(model, optimizer, rank, step)
        plain.step(step)
    assert_same(weights_of(model), weights_of(plain.model))
    saved = copy.deepcopy(optimizer.state_dict())
    train_step(model, optimizer, rank, 3)
    before = state_hash(model, optimizer)
    optimizer.load_state_dict(saved)
    assert state_hash(model, optimizer) != before
    swapped = copy.deepcopy(saved)
    swapped["param_groups"][0]["optimizer"] = "Muon 2"
    with pytest.raises(ValueError, match="is of 'Muon 2' and this optimizer's of 'Muon'"):
        optimizer.load_state_dict(swapped)
    assert len(set(gathered(state_hash(model, optimizer)))) == 1
    model.close()


@on_ranks(1, 2)
def test_a_group_is_added_to_the_one_that_it_names(rank: int, world_size: int) -> None:
    model, plain = wrapped(), Plain("muon", world_size)
    for each in (model.module.last.weight, model.module.last.bias, plain.model.last.weight, plain.model.last.bias):
        each.requires_grad_(False)

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = matrices_and_rest(model)
        return [torch.optim.Muon(matrices[:-1], lr=0.05), gemini.HybridAdam(rest[:-1], lr=1e-2)]

    optimizer, plain_optimizers = ShardedOptimizer(model, make(model)), make(plain.model)
    train_step(model, optimizer, rank, 0)
    model.module.last.weight.requires_grad_(True)
    plain.model.last.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="one of Muon, HybridAdam: found None"):
        optimizer.add_param_group({"params": [model.module.last.weight]})
    optimizer.add_param_group({"params": [model.module.last.weight], "optimizer": "Muon", "lr": 0.2})
    assert optimizer.param_groups[-1]["momentum"] == 0.95
    train_step(model, optimizer, rank, 1)
    assert set(optimizer.state[model.module.last.weight]) == {"momentum_buffer"}
    assert len(plain_optimizers) == 2
    model.close()


def test_what_cannot_be_one_optimizer_is_refused() -> None:
    model = wrapped()
    matrices, _ = matrices_and_rest(model)
    with pytest.raises(ValueError, match=r"Muon and HybridAdam both have a parameter of shape \(40, 24\)"):
        ShardedOptimizer(model, [torch.optim.Muon(matrices), gemini.HybridAdam(model.parameters())])
    with pytest.raises(ValueError, match="is no optimizer"):
        ShardedOptimizer(model, [])
    with pytest.raises(TypeError, match="found str"):
        ShardedOptimizer(model, [torch.optim.Muon(matrices), "HybridAdam"])
    given = muon_and_adam(model)
    optimizer = ShardedOptimizer(model, given)
    for call in (given[0].step, given[0].state_dict, lambda: given[1].add_param_group({"params": []})):
        with pytest.raises(UnsupportedError, match="that is one of 2 optimizers of one ShardedOptimizer"):
            call()
    with pytest.raises(UnsupportedError, match=r"setting param_groups of a Muon that is one of 2"):
        given[0].param_groups = []
    given[0].zero_grad()
    assert len(optimizer.param_groups) == 2
    model.close()


@on_ranks(1, 2)
def test_a_group_that_names_another_optimizer_starts_there_from_fresh_state(rank: int, world_size: int) -> None:
    """The momentum of the one lies where the first moments of the other do."""
    model, plain = wrapped(tensor_placement_policy="cpu"), Plain("muon", world_size)
    optimizer = ShardedOptimizer(model, muon_and_adam(model))
    for step in range(4):
        if step == 2:
            group = optimizer.param_groups[0]
            group["optimizer"] = "HybridAdam"
            with pytest.raises(ValueError, match=r"a param group with .* has no 'betas'"):
                train_step(model, optimizer, rank, step)
            optimizer.zero_grad()
            group |= {key: value for key, value in optimizer.param_groups[1].items() if key not in ("params", "lr")}
            plain.optimizers[1].add_param_group(
                {"params": plain.optimizers[0].param_groups.pop()["params"], "lr": 0.05}
            )
        train_step(model, optimizer, rank, step)
        plain.step(step)
        assert_same(weights_of(model), weights_of(plain.model))
    model.close()


@pytest.mark.parametrize("place", ["cuda", "cpu"])
@on_ranks(1, 2)
def test_a_parameter_that_moves_to_another_optimizer_starts_there_from_fresh_state(
    rank: int, world_size: int, place: str
) -> None:
    """Its states of the one lie where those of the other do."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = matrices_and_rest(model)
        return [torch.optim.Muon(matrices[:-1], lr=0.05), gemini.HybridAdam([*rest, matrices[-1]], lr=1e-2)]

    model, plain = wrapped(tensor_placement_policy=place), Plain("muon", world_size)
    plain.optimizers = make(plain.model)
    optimizer = ShardedOptimizer(model, make(model))
    for step in range(4):
        if step == 2:
            moved, its = model.module.last.weight, plain.model.last.weight
            muon, adam = optimizer.param_groups
            muon["params"].append(moved)
            adam["params"] = [p for p in adam["params"] if p is not moved]
            plain.optimizers[0].param_groups[0]["params"].append(its)
            group = plain.optimizers[1].param_groups[0]
            group["params"] = [p for p in group["params"] if p is not its]
        train_step(model, optimizer, rank, step)
        plain.step(step)
        assert_same(weights_of(model), weights_of(plain.model))
    assert set(optimizer.state[model.module.last.weight]) == {"momentum_buffer"}
    model.close()


@on_ranks(1, 2)
def test_states_that_share_memory_rest_on_the_disk_once(rank: int, world_size: int, tmp_path: Path) -> None:
    model, plain = wrapped(tensor_placement_policy="disk", disk_path=tmp_path), Plain("muon", world_size)
    optimizer = ShardedOptimizer(model, muon_and_adam(model))
    for step in range(3):
        train_step(model, optimizer, rank, step)
        plain.step(step)
    assert_same(weights_of(model), weights_of(plain.model))
    saved = optimizer.state_dict()
    number = 0
    for each in plain.optimizers:
        for parameter in each.param_groups[0]["params"]:
            for name, value in each.state[parameter].items():
                assert torch.equal(saved["state"][number][name], torch.as_tensor(value, dtype=torch.float32)), name
            number += 1
    model.close()


@on_ranks(1, 2)
def test_elementwise_ones_update_in_the_backward_and_the_average_follows_the_step(rank: int, world_size: int) -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = matrices_and_rest(model)
        return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9, foreach=False), gemini.HybridAdam(rest, lr=1e-2)]

    model, plain = wrapped(update_in_backward=True), Plain("muon", world_size)
    plain.optimizers = make(plain.model)
    average = AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = ShardedOptimizer(model, make(model), ema=0.9)
    for step in range(3):
        train_step(model, optimizer, rank, step)
        plain.step(step)
        average.update_parameters(plain.model)
    assert_same(weights_of(model), weights_of(plain.model))
    assert optimizer.ema is not None
    with optimizer.ema.weights():
        assert_same(weights_of(model), weights_of(average.module))
    model.close()
