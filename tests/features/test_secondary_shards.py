"""A second copy of the weights in each node (hpZ): gathers but the first after an update are from its ranks alone."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import (
    ConfigError,
    DivergenceError,
    GatheredParameters,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    load_checkpoint,
    save_checkpoint,
    state_hash,
)
from gemini.deepspeed.utils import safe_set_full_fp32_param
from gemini.placement.demand import Kind
from gemini.placement.predict import predict_steps
from gemini.placement.simulate import Exchange
from tests.dist import failing
from tests.dist.parity_cases import train_many
from tests.harness.dry_run import dry_run
from tests.harness.late_copies import installed
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.ranks import RankPool
from tests.harness.reference import train_plain
from tests.harness.runs import assert_equal_runs, wanted_on
from tests.zoo import mlp
from tests.zoo.models import MODELS

TWO = {"secondary_group_size": 2}
SMALLEST = {"model_data_memory": "smallest"}
HALF = {"dtype": torch.bfloat16}


def trained(rank: int, steps: int = 3, micro_batches: int = 1, **wrap: Any) -> list[Any]:
    """The hash of all states, the norms and this rank's losses after some steps on the data of `rank`."""
    model = ShardedModel(mlp.build(), **{"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", **wrap})
    optimizer = ShardedOptimizer(
        model, mlp.adam(model.parameters()), clip_grad_norm=0.05 if not wrap.get("update_in_backward") else None
    )
    losses, norms = [], []
    for step in range(steps):
        for micro in range(micro_batches):
            loss = mlp.loss_of(model, 100 * step + 10 * micro + rank, wrap.get("dtype"))
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    found = [state_hash(model), state_hash(optimizer), norms, losses]
    model.close()
    return found


@on_ranks(4, timeout_s=240)
@pytest.mark.parametrize("wrap", [{}, HALF, {"quantized_weights": 8}], ids=str)
def test_results_are_those_of_plain_zero_at_every_place(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        places: dict[str, dict[str, Any]] = {
            "fits": {"tensor_placement_policy": "cuda"},
            "host": {"tensor_placement_policy": "cpu"},
            "prefetched": {"tensor_placement_policy": "cpu", "max_prefetch": 3},
            "deferred, two micro-batches": {
                "tensor_placement_policy": "cpu",
                "deferred_update": True,
                "micro_batches": 2,
            },
            "in the backward": {"tensor_placement_policy": "cpu", "update_in_backward": True},
            "disk": {"tensor_placement_policy": "disk", "disk_path": folder},
            "many units": {"shard_strategy": "tensor", "chunk_size": 4 * mlp.CHUNK_NUMEL},
        }
        if "quantized_weights" not in wrap:
            places["lent homes"] = {"tensor_placement_policy": "cpu", "reuse_fp16_shard": True}
        for name, place in places.items():
            assert trained(rank, **wrap, **place, **TWO) == trained(rank, **wrap, **place), name
        least = mlp.smallest_budget(chunk_size=mlp.CHUNK_NUMEL, **wrap, **TWO)
        found = trained(rank, model_data_memory=least, chunk_size=mlp.CHUNK_NUMEL, **wrap, **TWO)
        assert found == trained(rank, **wrap, **places["fits"])


@on_ranks(4, timeout_s=120)
def test_late_copies_are_waited_for(rank: int, world_size: int) -> None:
    wanted = trained(rank, tensor_placement_policy="cpu", max_prefetch=1, steps=2)
    with installed() as late:
        assert trained(rank, tensor_placement_policy="cpu", max_prefetch=1, steps=2, **TWO) == wanted
    assert late.num_late > 0


TWO_BY_TWO: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("tied", {"accumulation": 2, "clip": 0.05}, SMALLEST),
    ("frozen_body", {"accumulation": 2}, {"tensor_placement_policy": "auto"}),
    ("experts", {"accumulation": 2}, {"tensor_placement_policy": "cpu"}),
    ("nested", {**HALF, "accumulation": 2, "clip": 0.05}, SMALLEST),
    ("odd_shapes", {}, {"shard_strategy": "tensor", "tensor_placement_policy": "cpu"}),
    ("zero_size", {}, {"deferred_update": True, "tensor_placement_policy": "cpu"}),
]


def test_two_nodes_of_two_ranks_equal_plain(ranks: RankPool) -> None:
    jobs = [(name, {"steps": 3, **recipe}, {**TWO, **wrap}) for name, recipe, wrap in TWO_BY_TWO]
    results = ranks(4).run(train_many, jobs, timeout_s=240)
    for place, (name, recipe, _) in enumerate(TWO_BY_TWO):
        options = {**recipe, **({"reduce_dtype": torch.float32} if recipe.get("dtype") else {})}
        wanted = train_plain(MODELS[name], 3, 4, **options)
        for rank, of_rank in enumerate(results):
            run, facts = of_rank[place]
            assert_equal_runs(run, wanted_on(rank, wanted))
            assert facts["budget_bytes"] is None or facts["peak_bytes"] <= facts["budget_bytes"], name


# -- What travels, and what it takes.


@on_ranks(4, timeout_s=120)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_all_ranks_are_asked_once_a_step_and_the_node_else(rank: int, world_size: int, micro_batches: int) -> None:
    """As the plan says, to the byte, with what the second copy takes at rest and over the link."""
    for wrap in (
        {"model_data_memory": "smallest"},
        {"model_data_memory": "smallest", "tensor_placement_policy": "cpu"},
    ):
        model = ShardedModel(mlp.build(), **mlp.placed(gradient_accumulation_steps=micro_batches, **TWO, **wrap))
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        manager = model.chunk_manager

        def loss(plain: nn.Module, step: int = 0, micro: int = 0) -> Tensor:
            found: Tensor = plain(mlp.inputs(10 * step + micro)).square().mean()
            return found

        schedule = dry_run(mlp.build(), model.plan.spec, loss)
        steps = predict_steps(model.plan, 3, schedule=schedule, micro_batches=micro_batches, rank=rank)
        num_chunks, whole = len(manager.chunks), sum(chunk.payload_bytes for chunk in manager.chunks)
        for step, predicted in enumerate(steps):
            before, links = manager.communicator.bytes_by_group, Counter(manager.memory.transfer.bytes_by_link)
            for micro in range(micro_batches):
                loss(model, step, micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent = {group: count - before[group] for group, count in manager.communicator.bytes_by_group.items()}
            assert predicted.exchanged[Exchange.GATHER] == (num_chunks, whole)
            assert sent["nearby"] == predicted.exchanged[Exchange.NEARBY][1] // 2 > 0
            # What ranks agree on travels among all of them, too.
            of_chunks = (whole + predicted.exchanged[Exchange.REDUCE][1]) * 3 // 4
            assert of_chunks <= sent["all"] <= of_chunks + 16384
            assert dict(Counter(manager.memory.transfer.bytes_by_link) - links) == predicted.bytes_by_link
        assert manager.memory.device.ledger.peak_bytes == steps[-1].device_peak
        held = sum(chunk.homes[Kind.PARAM].nbytes for chunk in manager.chunks)
        assert held == whole // 4 + whole // 2
        assert "inside the groups of a second copy" in model.plan.explain()
        model.close()


@on_ranks(4)
def test_weights_that_do_not_change_are_asked_of_all_ranks_once(rank: int, world_size: int) -> None:
    model = mlp.wrap("smallest", **TWO)
    communicator = model.chunk_manager.communicator
    sent = []
    with torch.no_grad():
        for step in range(4):
            before = communicator.bytes_by_group
            mlp.loss_of(model, step)
            sent.append([count - before[group] for group, count in communicator.bytes_by_group.items()])
    assert sent[0][0] > sent[2][0] and sent[2][1] > 0 and sent[2] == sent[3]
    model.close()


# -- What users write, load and lose.


@on_ranks(4, timeout_s=120)
def test_what_is_written_reaches_the_second_copy(rank: int, world_size: int) -> None:
    found: list[tuple[list[Tensor], dict[str, Tensor]]] = []
    for options in ({}, TWO):
        model = mlp.wrap("smallest", **options)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        weights, losses = dict(model.named_parameters()), []
        for step in range(3):
            mlp.loss_of(model, step)  # the second copy is there
            with GatheredParameters(weights["layers.2.weight"], modifier_rank=3):
                weights["layers.2.weight"].data.fill_(0.1 * step + rank)
            safe_set_full_fp32_param(weights["layers.3.weight"], torch.full((mlp.WIDTH, mlp.WIDTH), 0.01 * step))
            with torch.no_grad():
                weights["layers.1.bias"].add_(1.0)
                weights["layers.4.bias"][2:5] = 3.0
            for micro in range(2):
                loss = mlp.loss_of(model, 10 * step + rank + micro)
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            weights["layers.0.bias"].data.mul_(0.5)
        found.append((losses, dict(model.state_dict())))
        model.close()
    assert all(map(torch.equal, found[0][0], found[1][0]))
    mlp.assert_same(found[1][1], found[0][1])


@on_ranks(4)
def test_a_checkpoint_replaces_the_second_copy(rank: int, world_size: int) -> None:
    with TemporaryDirectory() as folder:
        folder = gathered(folder)[0]
        model, optimizer = mlp.sharded("smallest", **TWO)
        for step in range(2):
            mlp.train_step(model, optimizer, step)
        save_checkpoint(folder, model, optimizer)
        wanted = [mlp.train_step(model, optimizer, step) for step in (2, 3)]
        mlp.loss_of(model, 9)
        load_checkpoint(folder, model, optimizer)
        assert [mlp.train_step(model, optimizer, step) for step in (2, 3)] == wanted
        other, its_optimizer = mlp.sharded("cuda")
        load_checkpoint(Path(folder), other, its_optimizer)
        assert [mlp.train_step(other, its_optimizer, step) for step in (2, 3)] == wanted
        gathered(None)  # the folder is rank 0's
        model.close()
        other.close()


@on_ranks(4)
def test_plans_that_follow_one_another_have_the_same_results(rank: int, world_size: int) -> None:
    wanted = trained(rank, steps=4)
    model = ShardedModel(mlp.build(), chunk_size=mlp.CHUNK_NUMEL, device="emulated", **TWO)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), clip_grad_norm=0.05)
    least = mlp.smallest_budget(chunk_size=mlp.CHUNK_NUMEL, **TWO)
    for step in range(4):
        mlp.loss_of(model, 100 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        mlp.loss_of(model, step)
        model.change_budgets(model_data_memory=least if step % 2 else None)
    assert [state_hash(model), state_hash(optimizer)] == wanted[:2]
    model.close()


def ranks_fail(rank: int, world_size: int) -> list[Any]:
    """Rank 3 raises in forward, then in backward; then it takes another way. All catch it, and go on."""
    failing.impatient()
    model, optimizer, net = failing.make(**TWO)
    calm, calm_optimizer, _ = failing.make(**TWO)
    said = []
    other_way = [lambda net, x: net.layers[6], lambda net, x: failing.InBackward.apply(x, failing.boom), failing.boom]
    for step in range(3):
        failing.train_step(calm, calm_optimizer, rank, step)
        if rank == 3:
            net.at[4] = other_way[step]
        with pytest.raises((failing.Boom, RemoteRankError, DivergenceError)) as caught:
            failing.train_step(model, optimizer, rank, 70)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
        net.at.clear()
        optimizer.zero_grad()
        failing.train_step(model, optimizer, rank, step)
    return [state_hash(model, optimizer) == state_hash(calm, calm_optimizer), said]


def test_a_failure_on_one_node_is_forgotten_together(ranks: RankPool) -> None:
    exits = ranks(4).run(ranks_fail, fresh=True, forked=True, timeout_s=150)
    assert [each.exitcode for each in exits] == [0] * 4, exits
    assert all(each.result[0] for each in exits), [each.result[1] for each in exits]


# -- Where it is given, and what is refused.


@on_ranks(4, timeout_s=120)
def test_deepspeeds_key_trains_with_offload(rank: int, world_size: int) -> None:
    """There, loss and norm are 0 with offload, and small parameters crash."""
    runs = []
    for zero in ({}, {"zero_hpz_partition_size": 2}, {"zero_hpz_partition_size": 1}, {"zero_hpz_partition_size": 4}):
        config = {
            "train_batch_size": 32,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                **zero,
                "stage3_param_persistence_threshold": 20,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        }
        engine, *_ = gemini.initialize(mlp.build(), config=config, verbose=False)
        losses = []
        for step in range(3):
            loss = mlp.loss_of(engine, 10 * step + rank, torch.bfloat16)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        assert min(losses) > 0 and engine.optimizer.grad_norm > 0
        runs.append((losses, state_hash(engine.model)))
        assert len(engine.model.chunk_manager.communicator.bytes_by_group) == 1 + (
            zero == {"zero_hpz_partition_size": 2}
        )
        engine.model.close()
    assert runs == [runs[0]] * 4


@on_ranks(4)
def test_a_group_that_cannot_be_is_refused_by_name(rank: int, world_size: int) -> None:
    for options, error, words in (
        ({"secondary_group_size": 3}, ValueError, "secondary_group_size=3 does not divide the 4 ranks that share"),
        ({"secondary_group_size": 4, "shard_group_size": 2}, ValueError, "does not divide the 2 ranks"),
        ({"secondary_group_size": 1}, ValueError, "must be a number of ranks, of at least 2, or None, found 1"),
        ({"secondary_group_size": "2"}, TypeError, "must be a number of ranks, of at least 2, or None, found '2'"),
    ):
        with pytest.raises(error, match=words):
            ShardedModel(mlp.build(), device="emulated", **options)  # type: ignore[arg-type]
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}, "train_batch_size": 4}
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size.*does not divide the 4 ranks"):
        gemini.initialize(mlp.build(), config=config, verbose=False)
    for stage in (0, 1, 2):
        assert trained(rank, stage=stage, **TWO) == trained(rank, stage=stage)
