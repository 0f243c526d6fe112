"""Parameter groups that are added, changed or loaded: what they need, where it goes, and what is refused."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gemini import (
    BudgetError,
    DivergenceError,
    GeminiError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    state_hash,
)
from gemini.ranks import watchdog
from optim import HybridAdam
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import assert_same, weights_of
from tests.zoo.parts import Pair, at_some_places


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@at_some_places
def test_what_is_unfrozen_and_in_no_group_is_refused_until_it_is_added(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """What is unfrozen and in no group is an error at the step; add_param_group is the way."""

    class Grouped(Pair):
        def made(self) -> tuple[ShardedOptimizer, torch.optim.Optimizer]:
            mine, its = (mlp.adam(p for p in m.parameters() if p.requires_grad) for m in (self.model, self.plain))
            return ShardedOptimizer(self.model, mine), its

    pair = Grouped(rank, world_size, wrap)
    pair.steps(0)
    pair.flag(True, "layers.3")
    pair.backward(1)
    with pytest.raises(GeminiError, match=r"layers\.3\.weight, layers\.3\.bias: unfrozen, but .*add_param_group"):
        pair.optimizer.step()
    pair.zero_grad()
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    before = state_hash(pair.model, pair.optimizer)
    weight, bias = (pair.both(f"layers.3.{name}") for name in ("weight", "bias"))
    foreign = nn.Parameter(torch.zeros(3))
    for bad, complaint in (
        ([foreign], "not this model's"),
        ([weight[0], weight[0]], "'layers.3.weight' twice"),
        ([weight[0], pair.both("layers.4.weight")[0]], "more than one parameter group"),
    ):
        with pytest.raises(ValueError, match=complaint):
            pair.optimizer.add_param_group({"params": bad})
    with pytest.raises(ValueError, match="lr must be"):
        pair.optimizer.add_param_group({"params": [weight[0]], "lr": -1.0})
    assert len(pair.optimizer.param_groups) == 1
    assert state_hash(pair.model, pair.optimizer) == before
    for place, optimizer in enumerate((pair.optimizer, pair.its)):
        optimizer.add_param_group({"params": [weight[place], bias[place]], "lr": 0.05})
    pair.steps(2, 3)
    assert [group["lr"] for group in pair.optimizer.param_groups] == [1e-2, 0.05]
    pair.flag(True, "layers.1")  # in two steps: group first, flag later
    one = [pair.both(f"layers.1.{name}") for name in ("weight", "bias")]
    pair.flag(False, "layers.1")
    for place, optimizer in enumerate((pair.optimizer, pair.its)):
        optimizer.add_param_group({"params": [each[place] for each in one], "weight_decay": 0.5})
    pair.steps(4)
    pair.flag(True, "layers.1")
    pair.steps(5, 6)
    saved = pair.optimizer.state_dict()
    assert [len(group["params"]) for group in saved["param_groups"]] == [5, 2, 2]
    pair.optimizer.load_state_dict(saved)
    pair.steps(7)
    pair.model.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_run_again", [False, True])
@on_ranks(1, 2)
def test_a_group_that_is_added_uses_the_gradients_that_earlier_steps_left(
    rank: int, world_size: int, is_run_again: bool
) -> None:
    """NAdam keeps more states than the plan of wrapping counts, so that another plan comes with the group."""
    model, reference = mlp.wrap("cuda"), mlp.build()
    made = [torch.optim.NAdam(list(each.layers[0].parameters()), foreach=False) for each in (model, reference)]
    optimizers = ShardedOptimizer(model, made[0]), made[1]
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        mlp.loss_of(each, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": list(each.layers[1].parameters())})
        if is_run_again:
            mlp.loss_of(each, 1).backward()
    for ours, its in zip(model.layers[1].parameters(), reference.layers[1].parameters(), strict=True):
        assert its.grad is not None
        assert torch.equal(ours.grad.clone(), its.grad)
    for optimizer in optimizers:
        optimizer.step()
    assert_same(weights_of(model), weights_of(reference))


def test_a_schedule_of_the_plain_optimizer_moves_groups_that_are_added() -> None:
    model = mlp.wrap()
    weights = list(model.parameters())
    inner = mlp.adam(weights[:10])
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(inner, patience=0)
    optimizer = ShardedOptimizer(model, inner)
    optimizer.add_param_group({"params": weights[10:], "lr": 0.5})
    for _ in range(2):
        schedule.step(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(1e-3), 0.05]


def test_a_state_dict_of_another_optimizer_or_with_a_part_missing_is_refused() -> None:
    model, optimizer = mlp.sharded()
    mlp.train_step(model, optimizer)
    before = state_hash(model, optimizer)
    plain = mlp.build()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    mlp.train_step(plain, sgd)
    unstepped = torch.optim.SGD(mlp.build().parameters(), lr=0.1, momentum=0.9).state_dict()
    mixed = {**optimizer.state_dict(), "state": sgd.state_dict()["state"]}
    incomplete = optimizer.state_dict()
    del incomplete["state"][3]["exp_avg"]
    for saved, said in (
        (mixed, r"state of parameter 0 \(layers\.0\.weight\) has momentum_buffer; .* keeps step, exp_avg"),
        (unstepped, r"a param group of the state dict has no betas, eps, found .*'momentum'.* another optimizer's"),
        (incomplete, r"state of parameter 3 \(layers\.1\.bias\) has step, exp_avg_sq; .*leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(saved)
        assert state_hash(model, optimizer) == before
    mlp.train_step(model, optimizer, 1)


def test_state_that_groups_need_later_is_there_or_comes_with_the_step() -> None:
    """One group with momentum beside one without, a third one that is added, and momentum that is raised from 0."""
    model, plain = ShardedModel(mlp.build(), device="emulated", chunk_size=mlp.CHUNK_NUMEL), mlp.build()
    optimizers: list[torch.optim.Optimizer] = []
    for module in (model, plain):
        weights = list(module.parameters())
        sgd = torch.optim.SGD([{"params": weights[:2], "momentum": 0.9}, {"params": weights[2:4]}], lr=0.1)
        optimizers.append(ShardedOptimizer(model, sgd) if module is model else sgd)
        optimizers[-1].add_param_group({"params": weights[4:6], "momentum": 0.5})
    held = [tier.ledger.bytes_by_kind["optim"] for tier in model.chunk_manager.memory.tiers]
    assert sum(held) == 4 * 2 * mlp.CHUNK_NUMEL, "of the two chunks whose groups have momentum"
    for step in range(4):
        for module, optimizer in zip((model, plain), optimizers):
            for parameter in list(module.parameters())[6:]:
                parameter.requires_grad_(False)
            if step == 2:
                optimizer.param_groups[1]["momentum"] = 0.9
            mlp.loss_of(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
    assert (
        sum(tier.ledger.bytes_by_kind["optim"] for tier in model.chunk_manager.memory.tiers) == 4 * 3 * mlp.CHUNK_NUMEL
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_data_memory", [None, 24000, 30000, 40000])
@pytest.mark.parametrize("options", [{"amsgrad": True}, {}], ids=str)
def test_state_beyond_what_was_planned_takes_no_room_of_others(
    options: dict[str, Any], model_data_memory: int | None
) -> None:
    """A third state per element goes to the host with the others, before and after what is trained changes."""
    wrap: dict[str, Any] = {"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", "model_data_memory": model_data_memory}
    model, plain = ShardedModel(mlp.build(), **wrap), mlp.build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False, **options) for m in (model, plain)]
    optimizers[0] = ShardedOptimizer(model, optimizers[0])
    frozen = {2: ("layers.0.", "layers.4."), 3: ("layers.0.", "layers.3."), 5: ()}
    for step in range(7):
        for module, optimizer in zip((model, plain), optimizers):
            for name, parameter in module.named_parameters():
                if step in frozen:
                    parameter.requires_grad_(not name.startswith(frozen[step]))
            mlp.loss_of(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))


def test_a_param_group_that_finds_no_room_leaves_the_state_of_others_alone() -> None:
    """The device is full, so all states would have to go to the host, which is full too."""
    module = mlp.build()
    state_bytes = 4 * mlp.CHUNK_NUMEL
    room = {"model_data_memory": 7 * 2 * state_bytes + 1000, "host_memory": 5 * 2 * state_bytes}
    model = ShardedModel(module, chunk_size=mlp.CHUNK_NUMEL, device="emulated", **room)
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(weights, lr=1e-2))
    for bias in biases:
        bias.requires_grad_(False)
    mlp.train_step(model, optimizer, 0)
    before = state_hash(model, optimizer)
    with pytest.raises(BudgetError):
        optimizer.add_param_group({"params": biases, "amsgrad": True})
    assert state_hash(model, optimizer) == before
    mlp.train_step(model, optimizer, 1)


def test_momentum_that_is_raised_in_a_chunk_where_others_have_it_starts_afresh() -> None:
    results = []
    for sharded in (True, False):
        module: Any = mlp.build()
        if sharded:
            module = ShardedModel(module, device="emulated", chunk_size=mlp.CHUNK_NUMEL)
        named = list(module.named_parameters())
        groups = [{"params": [p for n, p in named if n.endswith(end)]} for end in ("weight", "bias")]
        optimizer: Any = torch.optim.SGD(groups, lr=0.1)
        groups = optimizer.param_groups
        groups[1]["momentum"] = 0.9
        optimizer = ShardedOptimizer(module, optimizer) if sharded else optimizer
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
            mlp.train_step(module, optimizer, step)
            saved = optimizer.state_dict()["state"]
            kept = {n for n, state in saved.items() if state.get("momentum_buffer") is not None}
            results.append((mlp.weights_of(module), kept))
    for (mine, its), (wanted, wanted_its) in zip(results[:4], results[4:], strict=True):
        mlp.assert_same(mine, wanted)
        assert its == wanted_its


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_settings_that_differ_by_rank_are_refused_before_the_step(rank: int, world_size: int, stage: int) -> None:
    """Rank 1 sets its optimizer otherwise: every rank is told so at the step, and nothing has changed by then."""
    pair = Pair(rank, world_size, {"stage": stage})
    pair.steps(0)
    group = pair.optimizer.param_groups[0]
    told = []
    nearly = torch.tensor(0.01).nextafter(torch.tensor(1.0))  # torch prints it as 0.0100
    for name, value, clips in (
        ("lr", 0.5, False),
        ("weight_decay", 0.5, False),
        ("lr", 0.25, True),
        ("lr", nearly, False),
    ):
        before, alike = state_hash(pair.model, pair.optimizer), group[name]
        pair.loss(pair.model, 1, rank).backward()
        if clips:
            pair.optimizer.clip_grad_norm_(1.0)
        if rank == 1:
            group[name] = value
        elif value is nearly:
            group[name] = torch.tensor(0.01)
        try:
            pair.optimizer.step()
        except DivergenceError as error:
            told.append(str(error))
        group[name] = alike
        assert state_hash(pair.model, pair.optimizer) == before
    pair.steps(2)
    pair.model.close()
    assert len(told) == 4, told
    assert all("the optimizer's settings differs between rank 0 and rank 1" in one for one in told)
    assert "lr=0.01" in told[0] and "lr=0.5" in told[0], told[0]
    assert "weight_decay=0.5" in told[1] and "lr=0.25" in told[2] and "lr=tensor(0.01" in told[3]


@on_ranks(2)
def test_ranks_that_group_or_order_parameters_otherwise_make_no_optimizer(rank: int, world_size: int) -> None:
    """Each rank updates a part of every weight, so it would use another learning rate than the rank with the rest."""
    model = mlp.wrap()
    parameters = list(model.parameters())
    for groups in (
        [parameters[: 2 + 2 * rank], parameters[2 + 2 * rank :]],
        [parameters[:: 1 - 2 * rank]],  # state dicts number parameters in this order
    ):
        adam = HybridAdam([{"params": its, "lr": 0.1 / (1 + place)} for place, its in enumerate(groups)])
        with pytest.raises(DivergenceError, match=r"rank 0 and rank 1: .*the same parameters in the same order"):
            ShardedOptimizer(model, adam)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    mlp.train_step(model, optimizer, rank)
    model.close()


@on_ranks(2)
def test_a_rank_that_cannot_make_its_optimizer_tells_the_others_why(rank: int, world_size: int) -> None:
    """Rank 1 alone is refused and goes on: the other one must not wait for it until the timeout."""
    model, foreign = mlp.wrap(rank_timeout=20), mlp.build()
    refused: list[tuple[nn.Module, dict[str, Any], str]] = [
        (model, {"clip_grad_norm": -1.0}, "clip_grad_norm must be"),
        (model, {"clip_gradnorm": 1.0}, "no argument 'clip_gradnorm'"),
        (foreign, {}, "not this model's"),
        (model, {"gpu_margin_mem_ratio": 2.0}, "gpu_margin_mem_ratio must be"),
    ]
    with mock.patch.object(watchdog, "POLL_S", 0.05):
        for *bad, said in refused:
            module, options = bad if rank == 1 else (model, {})
            with pytest.raises((TypeError, ValueError) if rank == 1 else RemoteRankError, match=said):
                ShardedOptimizer(model, mlp.adam(module.parameters()), **options)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    mlp.train_step(model, optimizer, rank)
    assert len(set(gathered(state_hash(model, optimizer)))) == 1
    model.close()
