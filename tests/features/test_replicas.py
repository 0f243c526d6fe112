"""Replicas of shards (HSDP): a mesh whose first dimension replicates and whose second shards.

REF adds the gradients of each group of ranks first, in rank order, and then the groups' sums: so bits are compared.
"""

from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gemini import ShardedModel, ShardedOptimizer, state_hash
from gemini.placement.simulate import Exchange
from tests.dist.parity_cases import train_many
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.ranks import RankPool
from tests.harness.reference import train_plain
from tests.harness.runs import assert_equal_runs, wanted_on
from tests.zoo import mlp
from tests.zoo.models import MODELS

HALF = {"dtype": torch.bfloat16}
SMALLEST = {"model_data_memory": "smallest"}

# model, how to train, how to wrap
TWO_BY_TWO: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied, clipped, accumulated": ("gpt2", {"accumulation": 2, "clip": 0.05}, SMALLEST),
    "unused, whole optimizer": ("sometimes_unused", {"clip": 0.05}, {"stage": 0, "tensor_placement_policy": "cpu"}),
    "frozen": ("frozen_body", {"accumulation": 2}, {"stage": 2, "tensor_placement_policy": "auto"}),
    "ranks use other experts": ("experts", {"accumulation": 2}, {"stage": 1, "shard_strategy": "tensor"}),
    "ranks use other experts, gathered": ("experts", {"clip": 0.05}, {"shard_strategy": "bucket", **SMALLEST}),
    "bf16": ("nested", {**HALF, "accumulation": 2, "clip": 0.05}, SMALLEST),
    "bf16, stage 0": ("nested", {**HALF, "clip": 0.05}, {"stage": 0, "tensor_placement_policy": "cpu"}),
    "odd": ("odd_shapes", {}, {"stage": 1, "shard_strategy": "tensor", "tensor_placement_policy": "cpu"}),
    "late gradients": ("zero_size", {}, {"stage": 2, "deferred_update": True, "tensor_placement_policy": "cpu"}),
}


def test_two_replicas_of_two_shards_equal_plain(ranks: RankPool) -> None:
    jobs = [
        (name, {"steps": 3, **recipe}, {"shard_group_size": 2, **wrap}) for name, recipe, wrap in TWO_BY_TWO.values()
    ]
    results = ranks(4).run(train_many, jobs, timeout_s=240)
    for place, (title, (name, recipe, _)) in enumerate(TWO_BY_TWO.items()):
        options = {**recipe, "shard_group": 2, **({"reduce_dtype": torch.float32} if recipe.get("dtype") else {})}
        wanted = train_plain(MODELS[name], 3, 4, **options)
        for rank, of_rank in enumerate(results):
            run, facts = of_rank[place]
            try:
                assert_equal_runs(run, wanted_on(rank, wanted))
            except AssertionError as error:
                raise AssertionError(f"{title}, rank {rank}: {error}") from None
            assert facts["budget_bytes"] is None or facts["peak_bytes"] <= facts["budget_bytes"], title


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
            loss = mlp.loss_of(model, 100 * step + 10 * micro + rank)
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
    for wrap in ({}, {"dtype": torch.bfloat16}, {"stage": 0}, {"stage": 1, "tensor_placement_policy": "cpu"}):
        model = mlp.wrap("cuda" if not wrap else "auto", shard_group_size=2, **wrap)  # type: ignore[arg-type]
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        communicator = model.chunk_manager.communicator
        for step in range(3):
            before = communicator.bytes_by_group
            x = mlp.inputs(step, model.settings.dtype)
            model(x).square().mean().backward()
            optimizer.step()
            sent = {group: count - before[group] for group, count in communicator.bytes_by_group.items()}
        exchanged = {what: num_bytes for what, (_, num_bytes) in model.plan.predicted.exchanged.items()}
        over_replicas = exchanged.pop(Exchange.REPLICAS)
        # Of what a group of two fills or sends, each rank sends a half.
        assert sent["replicas"] == over_replicas // 2, wrap
        assert sent["shards"] == sum(exchanged.values()) // 2, wrap
        assert sum(exchanged.values()) and over_replicas, wrap
        assert "2 replicas of 2 shards" in model.plan.explain()
        model.close()
