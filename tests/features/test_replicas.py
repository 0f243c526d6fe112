"""Replicas of shards (HSDP): a mesh whose first dimension replicates and whose second shards.

REF adds the gradients of each group of ranks first, in rank order, and then the groups' sums: so bits are compared.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gemini
from gemini import (
    ConfigError,
    DivergenceError,
    GatheredParameters,
    GeminiError,
    RankLostError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    ZeroInitContext,
    load_checkpoint,
    save_checkpoint,
    state_hash,
)
from gemini.deepspeed.utils import (
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_full_fp32_param,
)
from gemini.placement.simulate import Exchange
from tests.dist import failing
from tests.dist.parity_cases import train_many
from tests.harness.on_ranks import gathered, in_soak, on_ranks
from tests.harness.ranks import RankPool
from tests.harness.reference import train_plain
from tests.harness.runs import assert_equal_runs, wanted_on
from tests.zoo import mlp
from tests.zoo.models import MODELS

HALF = {"dtype": torch.bfloat16}
SMALLEST = {"model_data_memory": "smallest"}

# model, how to train, how to wrap
TWO_BY_TWO: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied, clipped": ("tied", {"accumulation": 2, "clip": 0.05}, SMALLEST),
    "unused, whole optimizer": ("sometimes_unused", {"clip": 0.05}, {"stage": 0, "tensor_placement_policy": "cpu"}),
    "frozen": ("frozen_body", {"accumulation": 2}, {"stage": 2, "tensor_placement_policy": "auto"}),
    "ranks use other experts": ("experts", {"accumulation": 2}, {"stage": 1}),
    "ranks use other experts, gathered": ("experts", {"clip": 0.05}, {"shard_strategy": "bucket", **SMALLEST}),
    "bf16": ("nested", {**HALF, "accumulation": 2, "clip": 0.05}, SMALLEST),
    "bf16, stage 0": ("nested", {**HALF, "clip": 0.05}, {"stage": 0, "tensor_placement_policy": "cpu"}),
    "odd": ("odd_shapes", {}, {"stage": 1, "shard_strategy": "tensor", "tensor_placement_policy": "cpu"}),
    "said before": (
        "nested",
        {**HALF, "accumulation": 3, "clip": 0.05, "knows_several": True},
        {"gradient_accumulation_steps": 3, "tensor_placement_policy": "cpu"},
    ),
    "experts, said before": (
        "experts",
        {"accumulation": 2, "knows_several": True},
        {"gradient_accumulation_steps": 2, "stage": 2, "shard_strategy": "tensor"},
    ),
    "late gradients": ("zero_size", {}, {"stage": 2, "deferred_update": True, "tensor_placement_policy": "cpu"}),
}


# Groups share weights and gradients, and all ranks optimizer states: groups add up from the first micro-batch on.
ALL: dict[str, Any] = {"optimizer_shard": "all"}
LATER: dict[str, Any] = {"knows_several": True}
ALL_STATES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied, clipped": ("tied", {**LATER, "accumulation": 2, "clip": 0.05}, {**ALL, **SMALLEST}),
    "unused": ("sometimes_unused", {**LATER, "clip": 0.05}, {**ALL, "tensor_placement_policy": "cpu"}),
    "frozen": ("frozen_body", {**LATER, "accumulation": 2}, {**ALL, "tensor_placement_policy": "auto"}),
    "experts": ("experts", {**LATER, "accumulation": 2}, {**ALL, "shard_strategy": "bucket", **SMALLEST}),
    "bf16": ("nested", {**HALF, **LATER, "clip": 0.05}, {**ALL, **SMALLEST}),
    "bf16, sums": ("nested", {**HALF, **LATER, "accumulation": 3}, {**ALL, "deferred_update": True}),
    "odd": ("odd_shapes", LATER, {**ALL, "shard_strategy": "tensor", "tensor_placement_policy": "cpu"}),
}
LARGE = {"large": ("gpt2", {"accumulation": 2, "clip": 0.05}, SMALLEST)}


@pytest.mark.parametrize(
    "trainings", [TWO_BY_TWO, ALL_STATES, *in_soak(LARGE)], ids=["replicas", "states over all", "large"]
)
def test_two_replicas_of_two_shards_equal_plain(
    ranks: RankPool, trainings: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]
) -> None:
    jobs = [
        (name, {"steps": 3, **recipe}, {"shard_group_size": 2, **wrap}) for name, recipe, wrap in trainings.values()
    ]
    results = ranks(4).run(train_many, jobs, timeout_s=240)
    for place, (title, (name, recipe, _)) in enumerate(trainings.items()):
        options = {**recipe, "shard_group": 2, **({"reduce_dtype": torch.float32} if recipe.get("dtype") else {})}
        wanted = train_plain(MODELS[name], 3, 4, **options)
        for rank, of_rank in enumerate(results):
            run, facts = of_rank[place]
            try:
                assert_equal_runs(run, wanted_on(rank, wanted))
            except AssertionError as error:
                raise AssertionError(f"{title}, rank {rank}: {error}") from None
            assert facts["budget_bytes"] is None or facts["peak_bytes"] <= facts["budget_bytes"], title
            if title == "large" or (title == "bf16" and trainings is TWO_BY_TWO):
                assert facts["num_chunks"] >= 8 and facts["spans_two_chunks"] == (title == "large"), facts
                assert facts["num_evictions"] and facts["num_refetches_elsewhere"], facts


# -- Equal meshes give equal bits, wherever the states are and whoever asks.


def mesh_of(rows: Sequence[Sequence[int]]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("replicate", "shard"))


def trained(rank: int, steps: int = 3, micro_batches: int = 1, clip: float | None = None, **wrap: Any) -> list[Any]:
    """The hash of all states, the norms and this rank's losses after some steps on the data of `rank`."""
    model = ShardedModel(mlp.build(), **{"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", **wrap})
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), clip_grad_norm=clip)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(micro_batches):
            loss = mlp.loss_of(model, 100 * step + 10 * micro + rank, model.settings.dtype)
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    found = [state_hash(model), state_hash(optimizer), norms, losses]
    model.close()
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 3, gathered, prefetched": {"tensor_placement_policy": "cpu", "max_prefetch": 2},
    "stage 3, deferred": {"tensor_placement_policy": "cpu", "deferred_update": True},
    "stage 3, in the backward": {"tensor_placement_policy": "cpu", "update_in_backward": True},
    "stage 3, in the backward, later": {
        "tensor_placement_policy": "cpu",
        "update_in_backward": True,
        "deferred_update": True,
    },
    "stage 3, another size": {"chunk_size": 3 * mlp.CHUNK_NUMEL, "shard_strategy": "tensor"},
    "stage 3, disk": {"tensor_placement_policy": "disk"},
    "stage 2": {"stage": 2},
    "stage 1, on the host": {"stage": 1, "tensor_placement_policy": "cpu"},
    "stage 0": {"stage": 0},
    "stage 0, in the backward": {"stage": 0, "update_in_backward": True, "tensor_placement_policy": "cpu"},
}


@on_ranks(4, timeout_s=180)
def test_a_mesh_has_the_same_bits_at_every_stage_and_place(rank: int, world_size: int) -> None:
    mesh, places = init_device_mesh("cpu", (2, 2)), VARIANTS
    with TemporaryDirectory() as folder:
        least = {"model_data_memory": mlp.smallest_budget(shard_group_size=2, chunk_size=mlp.CHUNK_NUMEL)}
        runs = {
            title: trained(
                rank,
                device_mesh=mesh,
                **wrap,
                **({"disk_path": folder} if "disk" in title else {}),
            )
            for title, wrap in {**places, "the least budget": least}.items()
        }
    first = runs["stage 3"]
    for title, run in runs.items():
        assert run == first, title
    assert len({repr(of_rank[:3]) for of_rank in gathered(first)}) == 1  # all replicas hold equal bits


@on_ranks(4, timeout_s=120)
def test_meshes_of_one_row_or_column_are_the_plain_cases(rank: int, world_size: int) -> None:
    options: dict[str, Any] = {"micro_batches": 2, "clip": 0.05}
    cube, alone = (init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")) for shape in ((2, 2, 1), (4, 1, 1)))
    for mesh, plain in (
        (init_device_mesh("cpu", (4,)), {}),
        (init_device_mesh("cpu", (1, 4)), {}),
        (init_device_mesh("cpu", (4, 1)), {"stage": 0}),
        (cube["a", "c"], {"stage": 0, "process_group": cube["a"].get_group()}),
        (cube["b"], {"process_group": cube["b"].get_group()}),
        (alone["b", "c"], {"process_group": alone["b"].get_group()}),
    ):
        run = trained(rank, device_mesh=mesh, **options)
        assert run == trained(rank, **plain, **options), mesh
        # Replicas that are not synchronised would differ, since ranks have other data.
        hashes = gathered(run[0])
        assert {hashes[other] for other in mesh.mesh.flatten().tolist()} == {run[0]}, mesh


@on_ranks(4)
def test_a_mesh_counts_its_ranks_in_its_own_order(rank: int, world_size: int) -> None:
    """Data that goes with the places in the mesh, and not with the ranks, is added in the same order."""
    place = [0, 2, 1, 3].index(rank)
    run = trained(place, device_mesh=mesh_of([[0, 2], [1, 3]]), clip=0.05)
    consecutive = trained(rank, shard_group_size=2, clip=0.05)
    assert run[:3] == consecutive[:3]
    assert trained(rank, device_mesh=mesh_of([[0, 1], [2, 3]]), clip=0.05) == consecutive


# -- What travels.


@on_ranks(4)
def test_a_step_sends_what_its_plan_says_in_each_group(rank: int, world_size: int) -> None:
    wraps: list[dict[str, Any]] = [{}, HALF, {"stage": 0}, {"stage": 1, "tensor_placement_policy": "cpu"}]
    several = {"gradient_accumulation_steps": 3}
    wraps += [several, {**HALF, **several, "tensor_placement_policy": "cpu"}, {**HALF, **several, "stage": 2}]
    for wrap in wraps:
        model = mlp.wrap("auto" if wrap and wrap != several else "cuda", shard_group_size=2, **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        communicator = model.chunk_manager.communicator
        for step in range(3):
            before = communicator.bytes_by_group
            for micro in range(wrap.get("gradient_accumulation_steps", 1)):
                x = mlp.inputs(3 * step + micro, model.settings.dtype)
                model(x).square().mean().backward()
            optimizer.step()
            sent = {group: count - before[group] for group, count in communicator.bytes_by_group.items()}
        exchanged = {what: num_bytes for what, (_, num_bytes) in model.plan.predicted.exchanged.items()}
        over_replicas = exchanged.pop(Exchange.REPLICAS)
        if several.items() <= wrap.items():
            # Once in a step, although there are three backwards: a sum in fp32, and the mean that comes back.
            assert over_replicas == 2 * 4 * sum(chunk.layout.shard_numel for chunk in model.plan.packing.chunks)
        # Of what a group of two fills or sends, each rank sends a half.
        assert sent["replicas"] == over_replicas // 2, wrap
        assert sent["shards"] == sum(exchanged.values()) // 2, wrap
        assert sum(exchanged.values()) and over_replicas, wrap
        assert "2 replicas of 2 shards" in model.plan.explain()
        model.close()


@on_ranks(4)
def test_micro_batches_are_reduced_over_replicas_once_a_step(rank: int, world_size: int) -> None:
    """The first backward may be the only one, and exchanges its gradients at once, unless it is said to be not."""
    sent, weights = [], []
    several: dict[str, Any] = {"gradient_accumulation_steps": 3}
    for is_synced, told, wrap in (
        (True, False, {}),
        (False, False, {}),
        (True, False, several),
        (True, True, {}),
    ):
        model = mlp.wrap("cpu", shard_group_size=2, **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        communicator = model.chunk_manager.communicator
        before = communicator.bytes_by_group["replicas"]
        for micro in range(3):
            if told:
                model.set_requires_all_reduce(micro == 2)
            with nullcontext() if is_synced or micro == 2 else model.no_sync():
                mlp.loss_of(model, 10 * micro + rank).backward()
        optimizer.step()
        sent.append(communicator.bytes_by_group["replicas"] - before)
        weights.append(model.state_dict())
        model.close()
    assert sent == [2 * sent[1], sent[1], sent[1], sent[1]]
    for name, weight in weights[0].items():
        for others in weights[1:]:
            torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-4)
        assert torch.equal(weights[2][name], weights[3][name]), name
    with pytest.raises(ValueError, match="recurse=False"):
        model.set_requires_all_reduce(True, recurse=False)


@on_ranks(4, timeout_s=120)
def test_micro_batches_have_the_same_bits_at_every_stage_and_place(rank: int, world_size: int) -> None:
    least = {"model_data_memory": mlp.smallest_budget(shard_group_size=2, chunk_size=mlp.CHUNK_NUMEL)}
    places = [least, *(VARIANTS[each] for each in ("stage 3, deferred", "stage 3, another size", "stage 2"))]
    places += [VARIANTS["stage 1, on the host"], {"reuse_fp16_shard": True, **least}]
    for options in ({}, {"gradient_accumulation_steps": 3}, {"dtype": torch.bfloat16}):
        runs = [trained(rank, 2, 3, 0.05, shard_group_size=2, **options, **place) for place in places]
        assert all(run == runs[0] for run in runs), options
        assert len({repr(of_rank[:3]) for of_rank in gathered(runs[0])}) == 1, options


# What a user does between the backwards of a step and the step itself.
BETWEEN = ("read", "write", "clip", "no_sync", "zero_grad", "save", "fail", "discard")


def _fail_behind(layer: Any, inputs: Any, output: torch.Tensor) -> Any:
    return failing.InBackward.apply(output, failing.boom)


def _go_on(layer: Any, inputs: Any, output: torch.Tensor) -> None:
    """Change nothing."""


def mean_gradients(plain: mlp.Mlp, micro: int, world_size: int) -> dict[str, torch.Tensor]:
    """The mean over ranks of the gradients of one micro-batch, in plain PyTorch."""
    total = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
    for rank in range(world_size):
        plain.zero_grad()
        mlp.loss_of(plain, 10 * micro + rank).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            total[name] += parameter.grad / world_size
    return total


@on_ranks(4, timeout_s=120)
@pytest.mark.parametrize("wrap", [{}, ALL, *in_soak({"stage": 1})], ids=["stage 3", "states over all", "stage 1"])
def test_gradients_are_the_mean_of_all_ranks_whatever_comes_between_backwards(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    for between in BETWEEN:
        model = mlp.wrap("smallest", shard_group_size=2, gradient_accumulation_steps=3, **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        weights, plain = dict(model.named_parameters()), mlp.build()
        wanted = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
        some = "layers.2.weight"
        for micro in range(3):
            with model.no_sync() if (between, micro) == ("no_sync", 1) else nullcontext():
                mlp.loss_of(model, 10 * micro + rank).backward()
            for name, mean in mean_gradients(plain, micro, world_size).items():
                wanted[name] += mean
            if micro == 2:
                continue
            if between == "read":
                grad = weights[some].grad
                torch.testing.assert_close(safe_get_full_grad(weights[some]), wanted[some], rtol=1e-5, atol=1e-6)
                assert grad is not None and torch.equal(grad.cpu(), safe_get_full_grad(weights[some]))
            elif between == "write":
                weights[some].grad *= 2
                weights["layers.3.bias"].grad = torch.ones(mlp.WIDTH)
                wanted[some] *= 2
                wanted["layers.3.bias"].fill_(1.0)
            elif between == "clip":
                norm = optimizer.clip_grad_norm_(1e6)
                torch.testing.assert_close(norm, torch.stack([g.norm() for g in wanted.values()]).norm())
            elif between == "zero_grad" and micro == 0:
                optimizer.zero_grad()
                wanted = {name: torch.zeros_like(mean) for name, mean in wanted.items()}
            elif between == "discard":
                weights[some].grad = None
                wanted[some].zero_()
            elif between == "save":
                with pytest.raises(GeminiError, match="replicas have not added up"):
                    safe_get_local_grad(weights[some])
                folder = Path(gathered(mkdtemp())[0])
                save_checkpoint(folder, model, optimizer)
                again = mlp.wrap("cpu", shard_group_size=2, gradient_accumulation_steps=3, **wrap)
                other = ShardedOptimizer(again, mlp.adam(again.parameters()))
                load_checkpoint(folder, again, other)
                assert state_hash(again, other) == state_hash(model, optimizer)
                model.close()
                model, optimizer, weights = again, other, dict(again.named_parameters())
            elif between == "fail" and micro == 1:
                hook = model.module.layers[2].register_forward_hook(_fail_behind if rank == 3 else _go_on)
                loss = mlp.loss_of(model, 10 + rank)
                hook.remove()
                with pytest.raises((failing.Boom, RemoteRankError)):
                    loss.backward()
                optimizer.zero_grad()
                wanted = {name: torch.zeros_like(mean) for name, mean in wanted.items()}
        for name, parameter in weights.items():
            found = safe_get_full_grad(parameter)
            torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-6, msg=f"{between}: {name}")
        if between == "clip":  # the gradients are others now, and a step would refuse the clip of those before
            optimizer.clip_grad_norm_(1e6)
        optimizer.step()
        assert len(set(gathered(state_hash(model, optimizer)))) == 1, between
        model.close()


# -- Between steps: states that users read and write.


@on_ranks(4)
def test_replicas_stay_equal_whatever_users_write(rank: int, world_size: int) -> None:
    """Each rank gives gradients and states other values. Of the ranks of a group each one's part counts."""
    for wrap in ({"stage": 0}, {}, ALL):
        model = mlp.wrap("smallest", shard_group_size=2, **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        weights = dict(model.named_parameters())
        mlp.loss_of(model, rank).backward()
        for number, (name, parameter) in enumerate(weights.items()):
            if number % 2:
                parameter.grad = torch.full_like(parameter, 1.0 + rank, device="cpu")
            mean = safe_get_full_grad(parameter)
            assert len({float(each.sum()) for each in gathered(mean)}) == 1, name
        optimizer.step()
        assert len(set(gathered(state_hash(model, optimizer)))) == 1
        assert (safe_get_full_optimizer_state(weights["layers.0.bias"], "exp_avg") > 0).all()
        optimizer.state[weights["layers.1.bias"]]["exp_avg"] = torch.full((mlp.WIDTH,), float(rank))
        with GatheredParameters(weights["layers.2.weight"], modifier_rank=3):
            weights["layers.2.weight"].data.fill_(float(rank))
        safe_set_full_fp32_param(weights["layers.3.weight"], torch.ones(mlp.WIDTH, mlp.WIDTH))
        mlp.loss_of(model, rank).backward()
        optimizer.step()
        assert len(set(gathered(state_hash(model, optimizer)))) == 1
        whole = model.state_dict()
        assert (whole["layers.2.weight"] - 3).abs().max() < 0.1 > (whole["layers.3.weight"] - 1).abs().max()
        model.close()


@on_ranks(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all_replicas(rank: int, world_size: int) -> None:
    model = mlp.wrap("cpu", shard_group_size=2, dtype=torch.float16)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), initial_scale=2.0**10, hysteresis=1)
    before = state_hash(model)
    loss = mlp.loss_of(model, rank, torch.float16).float()
    optimizer.backward(loss * (float("inf") if rank == 3 else 1.0))
    optimizer.step()
    assert gathered([optimizer.loss_scale, state_hash(model)]) == [[2.0**9, before]] * 4


@on_ranks(4)
def test_a_model_is_built_and_broadcast_on_a_mesh(rank: int, world_size: int) -> None:
    """Ranks have other seeds: rank 0's weights and buffers win on all replicas."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(rank)
    with ZeroInitContext(device_mesh=mesh):
        built = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))
    built[1].running_mean.fill_(float(rank))
    model = ShardedModel(built, device_mesh=mesh, device="emulated")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    model.close()


# -- Checkpoints: one replica writes, and any mesh reads.


def saved(rank: int, world_size: int, folder: str, wrap: dict[str, Any], steps: int, source: str | None) -> list[Any]:
    """The hash of a training that went on from the checkpoint in `source`, before and after `steps`; it is saved."""
    model = ShardedModel(mlp.build(), **{"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", **wrap})
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), clip_grad_norm=0.05)
    if source is not None:
        load_checkpoint(source, model, optimizer)
    hashes = [state_hash(model, optimizer)]
    for step in range(steps):
        mlp.loss_of(model, 10 * step + rank).backward()
        optimizer.step()
    save_checkpoint(folder, model, optimizer)
    hashes.append(state_hash(model, optimizer))
    model.close()
    return hashes


def test_a_checkpoint_of_a_mesh_is_written_once_and_loads_on_any(ranks: RankPool, tmp_path: Path) -> None:
    def run(world_size: int, name: str, wrap: dict[str, Any], steps: int, source: str | None) -> list[Any]:
        place = None if source is None else str(tmp_path / source)
        found = ranks(world_size).run(saved, str(tmp_path / name), wrap, steps, place, timeout_s=120)
        assert found == [found[0]] * world_size
        return found[0]

    mesh: dict[str, Any] = {"shard_group_size": 2}
    _, first = run(4, "mesh", mesh, 2, None)
    assert run(4, "flat", {}, 0, "mesh") == [first, first]
    assert run(2, "pair", {"stage": 2}, 1, "mesh")[0] == first
    assert run(4, "again", {**mesh, "stage": 1, "tensor_placement_policy": "cpu"}, 0, "flat")[0] == first
    after_pair = run(2, "pair, again", {}, 0, "pair")[0]
    # Optimizer states over all ranks: to and from such a training.
    assert run(4, "all", {**mesh, **ALL}, 1, "pair")[0] == after_pair
    after_all = run(2, "all, on two", {"stage": 1}, 0, "all")[0]
    assert run(4, "all, again", {**mesh, **ALL, "tensor_placement_policy": "cpu"}, 0, "all")[0] == after_all
    assert run(4, "all, as replicas", mesh, 0, "all")[0] == after_all
    assert run(4, "mesh, again", mesh, 0, "pair")[0] == after_pair
    bytes_of = [
        {file.name[:12]: file.stat().st_size for file in (tmp_path / name).rglob("states-*")}
        for name in ("mesh", "flat")
    ]
    assert sum(bytes_of[0].values()) <= sum(bytes_of[1].values())
    # The other replica's files have a header, and no tensor.
    assert all(bytes_of[0][f"states-0000{rank}"] < 100 for rank in (2, 3)), bytes_of[0]


# -- Failures of a rank in either group.


def replicas_fail(rank: int, world_size: int) -> list[Any]:
    """Rank 3 raises in forward, then in backward; then it takes another way. All catch it, and go on."""
    failing.impatient()
    model, optimizer, net = failing.make(shard_group_size=2)
    calm, calm_optimizer, _ = failing.make(shard_group_size=2)
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


def one_of_a_mesh_is_killed(rank: int, world_size: int) -> None:
    model, optimizer, _ = failing.make(shard_group_size=2)
    for step in range(3):
        model(failing.batch(rank, step)).square().mean().backward()
        if rank == 3 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


def test_a_failure_in_one_replica_reaches_all_and_is_forgotten_together(ranks: RankPool) -> None:
    exits = ranks(4).run(replicas_fail, fresh=True, forked=True, timeout_s=150)
    assert [each.exitcode for each in exits] == [0] * 4, exits
    for each in exits:
        is_as_calm, said = each.result
        assert is_as_calm, said
    for said in (exits[0].result[1], exits[1].result[1], exits[2].result[1]):
        assert "ranks took different ways" in said[0] and "layers.6" in said[0], said
        assert "RemoteRankError: rank 3 failed" in said[1] and "RemoteRankError: rank 3 failed" in said[2], said


def test_a_killed_rank_is_lost_to_the_other_replica_too(ranks: RankPool) -> None:
    *survivors, killed = ranks(4).run(one_of_a_mesh_is_killed, fresh=True, forked=True, timeout_s=90)
    assert killed.exitcode == -9
    for survivor in survivors:
        assert survivor.exitcode == 1, survivor
        assert isinstance(survivor.error, RankLostError | RemoteRankError), survivor
        assert "rank 3" in str(survivor.error), survivor


# -- Where a mesh is given, and what is refused.


@on_ranks(4)
def test_an_engine_takes_a_mesh_and_deepspeeds_group_size(rank: int, world_size: int) -> None:
    ours = {"stage": 3, "train_batch_size": 32, "optimizer": {"type": "HybridAdam", "params": {"lr": 1e-2}}}
    theirs = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    hashes = []
    for config, options in (
        (ours, {"device_mesh": init_device_mesh("cpu", (2, 2))}),
        ({**ours, "shard_group_size": 2}, {}),
        ({**theirs, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}, {}),
    ):
        engine, *_ = gemini.initialize(mlp.build(), config=config, verbose=False, **options)
        for step in range(2):
            engine.backward(mlp.loss_of(engine, 10 * step + rank))
            engine.step()
        assert (engine.batch_sizes.micro, len(engine.model.chunk_manager.communicator.rows)) == (8, 2)
        hashes.append(state_hash(engine.model))
        engine.model.close()
    assert len(set(hashes)) == 1


@on_ranks(4)
def test_a_mesh_that_cannot_be_is_refused_by_name(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    rows = [[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]]
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"device_mesh": "4"}, TypeError, "device_mesh must be a torch DeviceMesh or None, found str"),
        ({"device_mesh": cube}, UnsupportedError, r"found 3: give the part .* such as mesh\['a', 'b'\]"),
        ({"device_mesh": mesh, "process_group": dist.group.WORLD}, ValueError, "give one of them"),
        (
            {"device_mesh": mesh, "shard_group_size": 4},
            ValueError,
            "contradicts a device_mesh of 2 replicas of 2 shards",
        ),
        ({"shard_group_size": 3}, ValueError, "shard_group_size=3 does not divide 4 ranks into groups"),
        (
            {"device_mesh": mesh_of(rows)},
            DivergenceError,
            "the device_mesh differs between ranks: rank 0 has the groups",
        ),
    ]
    module = mlp.build()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for options, error, words in refused:
        with pytest.raises(error, match=words):
            ShardedModel(module, device="emulated", **options)
        mlp.assert_same(dict(module.state_dict()), before)
    with pytest.raises(ConfigError, match="shard_group_size=3 does not divide 4 ranks"):
        gemini.initialize(module, config={"shard_group_size": 3}, verbose=False)


def test_a_mesh_needs_ranks_that_have_met() -> None:
    with pytest.raises(UnsupportedError, match="a device_mesh needs a process group"):
        ShardedModel(mlp.build(), device="emulated", device_mesh=object())  # type: ignore[arg-type]
