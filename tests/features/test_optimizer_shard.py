"""Weights and gradients in groups of ranks, optimizer states over all ranks (`optimizer_shard="all"`, HFSDP).

What it has in common with replicas is tested beside them, in test_replicas.py.
"""

from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gemini
from gemini import (
    ConfigError,
    GatheredParameters,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    ZeroInitContext,
    state_hash,
)
from gemini.deepspeed.utils import safe_get_full_grad
from gemini.engine.config import load_config
from gemini.placement.simulate import Exchange
from gemini.settings import Settings
from tests.dist import failing
from tests.harness.late_copies import installed
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo import mlp

CHUNK = 4 * mlp.CHUNK_NUMEL
ALL: dict[str, Any] = {"shard_group_size": 2, "optimizer_shard": "all", "chunk_size": CHUNK}


def trained(rank: int, steps: int = 2, micro_batches: int = 2, clip: float | None = 0.05, **wrap: Any) -> list[Any]:
    """The hash of all states, whole weights, the norms and this rank's losses after some steps."""
    model = ShardedModel(mlp.build(), **{"device": "emulated", **wrap})
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
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    found = [state_hash(model, optimizer), weights, norms, losses]
    model.close()
    return found


@on_ranks(4, soak=(6,), timeout_s=180)
def test_states_over_all_ranks_have_the_bits_of_replicas_at_every_place(rank: int, world_size: int) -> None:
    """In fp32 each group's sum has all its bits, so that replicas that add up alike have these too."""
    least = {"model_data_memory": mlp.minimum_bytes(mlp.build(), **ALL)}
    with TemporaryDirectory() as folder:
        places: list[dict[str, Any]] = [
            {},
            least,
            {"chunk_size": mlp.CHUNK_NUMEL, "shard_strategy": "tensor"},
            {"tensor_placement_policy": "cpu", "max_prefetch": 2, "deferred_update": True},
            {"tensor_placement_policy": "disk", "disk_path": folder},
            {"param_persistence_threshold": 100},
        ]
        runs = [trained(rank, **{**ALL, **place}) for place in places]
        half = [trained(rank, **{**ALL, **place, "dtype": torch.bfloat16}) for place in places]
    assert all(run == runs[0] for run in runs)
    assert all(run == half[0] for run in half)
    assert runs[0] == trained(rank, shard_group_size=2, gradient_accumulation_steps=2)
    assert len({repr(of_rank[:3]) for of_rank in gathered(runs[0])}) == 1


@on_ranks(4, timeout_s=120)
def test_late_copies_are_waited_for(rank: int, world_size: int) -> None:
    """Sums of a group on the host cross the link to be exchanged, and what comes back does; so with replicas."""
    for how in (ALL, {"shard_group_size": 2, "chunk_size": CHUNK}):
        for dtype in (None, torch.bfloat16):
            wrap: dict[str, Any] = {**how, "dtype": dtype, "tensor_placement_policy": "cpu", "max_prefetch": 2}
            hashes = []
            for is_late in (False, True):
                with installed() if is_late else nullcontext() as late:
                    model = ShardedModel(mlp.build(), device="emulated", **wrap)
                    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), clip_grad_norm=0.05)
                    for step in range(2):
                        for micro in range(3):
                            mlp.loss_of(model, 10 * step + micro + rank, dtype).backward()
                            if micro == 1:
                                assert safe_get_full_grad(model.module.layers[2].weight) is not None
                        optimizer.step()
                        optimizer.zero_grad()
                    hashes.append(state_hash(model, optimizer))
                    model.close()
            assert late is not None and late.num_late > 0
            assert hashes[0] == hashes[1], (how, dtype)


@on_ranks(4)
def test_a_mesh_divides_as_consecutive_ranks_do(rank: int, world_size: int) -> None:
    """A mesh in another order, and meshes of one row or one column, which are ZeRO and stage 1."""
    place = [0, 2, 1, 3].index(rank)
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"chunk_size": CHUNK, "optimizer_shard": "all"}
    assert trained(place, device_mesh=mesh, **options)[:3] == trained(rank, **ALL)[:3]
    row, column = init_device_mesh("cpu", (1, 4)), init_device_mesh("cpu", (4, 1))
    assert trained(rank, device_mesh=row, **options) == trained(rank, chunk_size=CHUNK)
    assert trained(rank, device_mesh=column, **options) == trained(rank, chunk_size=CHUNK, stage=1)


@on_ranks(4)
def test_a_rank_holds_and_sends_what_the_formulas_say(rank: int, world_size: int) -> None:
    """Of 2 x 2 ranks: states / 4 + (gradients + weights) / 2; between groups two halves, however many backwards."""
    for dtype, weight, states in ((None, 4, 12), (torch.bfloat16, 2, 12)):
        for micro_batches in (1, 3):
            several = {} if micro_batches == 1 else {"gradient_accumulation_steps": micro_batches}
            model = mlp.wrap("cuda", **ALL, dtype=dtype, **several)
            optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
            communicator, plan = model.chunk_manager.communicator, model.plan
            for step in range(3):
                before = communicator.bytes_by_group
                for micro in range(micro_batches):
                    mlp.loss_of(model, 10 * step + micro + rank, dtype).backward()
                optimizer.step()
                sent = {group: count - before[group] for group, count in communicator.bytes_by_group.items()}
            numel = sum(chunk.layout.numel for chunk in plan.packing.chunks)
            kinds = model.chunk_manager.memory.device.ledger.bytes_by_kind
            held = {kind: kinds.get(kind, 0) for kind in ("param", "grad", "master", "optim")}
            # The rank's own part of the weights is a half of the master in bf16, and all of it in fp32.
            sums = 4 if dtype is not None and micro_batches > 1 else 0
            assert held["param"] == numel * weight // 2 + numel * weight // 4
            assert held["grad"] == numel * (weight + sums) // 2
            assert held["param"] + held["master"] + held["optim"] == numel * weight // 2 + numel * states // 4
            exchanged = {what: num_bytes for what, (_, num_bytes) in plan.predicted.exchanged.items()}
            assert exchanged[Exchange.MEAN_ACROSS] == numel // 2 * (sums or weight)
            assert exchanged[Exchange.GATHER_ACROSS] == numel // 2 * weight
            assert exchanged[Exchange.REDUCE] == micro_batches * numel * weight
            assert exchanged[Exchange.NEARBY] >= numel * weight
            # Of what a group of two fills or sends, each rank sends a half.
            assert sent["across"] == (exchanged[Exchange.MEAN_ACROSS] + exchanged[Exchange.GATHER_ACROSS]) // 2
            assert sent["nearby"] == (exchanged[Exchange.REDUCE] + exchanged[Exchange.NEARBY]) // 2
            assert sent["shards"] == 0
            assert "2 groups of 2" in plan.explain()
            model.close()


@on_ranks(4)
def test_links_carry_what_the_plan_says(rank: int, world_size: int) -> None:
    """Sums that rest on the host come to the device to be exchanged, and go back: once a step."""
    several: dict[str, Any] = {"gradient_accumulation_steps": 3, "dtype": torch.bfloat16}
    for how in (ALL, {"shard_group_size": 2, "chunk_size": CHUNK}):
        model = mlp.wrap("cpu", **how, **several)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        links = model.chunk_manager.memory.transfer.bytes_by_link
        for step in range(3):
            before = dict(links)
            for micro in range(3):
                mlp.loss_of(model, 10 * step + micro + rank, torch.bfloat16).backward()
            optimizer.step()
            moved = {link: num_bytes - before.get(link, 0) for link, num_bytes in links.items()}
        assert moved == model.plan.predicted.bytes_by_link, how
        model.close()


@on_ranks(4)
def test_weights_that_are_edited_or_used_between_steps_are_those_of_all_ranks(rank: int, world_size: int) -> None:
    both = [ShardedModel(mlp.build(), device="emulated", **how) for how in (ALL, {"shard_group_size": 2})]
    hashes = []
    for model in both:
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for step in range(3):
            mlp.loss_of(model, 10 * step + rank).backward()
            if step == 1:
                with torch.no_grad():
                    model.module.layers[2].bias.zero_()
            optimizer.step()
            with GatheredParameters(model.module.layers[3].weight, modifier_rank=2):
                model.module.layers[3].weight.data.add_(1.0 + rank)
            with torch.no_grad():
                seen = float(mlp.loss_of(model, step))
        hashes.append([state_hash(model, optimizer), seen])
        model.close()
    assert hashes[0] == hashes[1]


@on_ranks(4)
def test_an_optimizer_of_whole_tensors_steps_as_with_replicas(rank: int, world_size: int) -> None:
    hashes = []
    for how in (ALL, {"shard_group_size": 2}):
        model = ShardedModel(mlp.build(), device="emulated", **how)
        matrices = [each for each in model.parameters() if each.dim() == 2]
        others = [each for each in model.parameters() if each.dim() != 2]
        optimizer = ShardedOptimizer(model, [torch.optim.Muon(matrices, lr=0.01), mlp.adam(iter(others))])
        for step in range(2):
            mlp.loss_of(model, 10 * step + rank).backward()
            optimizer.step()
        hashes.append(state_hash(model, optimizer))
        model.close()
    assert hashes[0] == hashes[1]


@on_ranks(4, timeout_s=120)
def test_a_failed_backward_on_one_rank_is_forgotten_by_all_groups(rank: int, world_size: int) -> None:
    found = []
    for fails in (True, False):
        model = ShardedModel(mlp.build(), device="emulated", **ALL)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for step in range(3):
            mlp.loss_of(model, 10 * step + rank).backward()
            if fails and step == 1:
                hook = model.module.layers[2].register_forward_hook(_fail_behind if rank == 3 else _go_on)
                loss = mlp.loss_of(model, rank)
                hook.remove()
                with pytest.raises((failing.Boom, RemoteRankError)):
                    loss.backward()
                optimizer.zero_grad()
                mlp.loss_of(model, 10 * step + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(state_hash(model, optimizer))
        model.close()
    assert found[0] == found[1]


def _fail_behind(layer: Any, inputs: Any, output: torch.Tensor) -> Any:
    return failing.InBackward.apply(output, failing.boom)


def _go_on(layer: Any, inputs: Any, output: torch.Tensor) -> None:
    """Change nothing."""


@on_ranks(4)
def test_a_config_says_it_too(rank: int, world_size: int) -> None:
    config = {"train_batch_size": 32, "optimizer": {"type": "HybridAdam", "params": {"lr": 1e-2}}}
    hashes = []
    for its in ({**config, **ALL}, {**config, "shard_group_size": 2}):
        engine, *_ = gemini.initialize(mlp.build(), config=its, verbose=False)
        for step in range(2):
            engine.backward(mlp.loss_of(engine, 10 * step + rank))
            engine.step()
        hashes.append(state_hash(engine.model))
        engine.model.close()
    assert hashes[0] == hashes[1]


@on_ranks(4)
@pytest.mark.parametrize("rows", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=["in order", "in another"])
def test_a_module_that_was_built_divided_is_divided_again(rank: int, world_size: int, rows: list[list[int]]) -> None:
    """It is built over all ranks in their order, and trained over them in that of their places in the groups."""
    mesh = DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(rank)
    with ZeroInitContext(device_mesh=mesh):
        built = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Linear(70, 300), torch.nn.Linear(300, 3))
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Linear(70, 300), torch.nn.Linear(300, 3))
    model = ShardedModel(built, device_mesh=mesh, device="emulated", optimizer_shard="all", chunk_size=4096)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    x = torch.ones(2, 40)
    torch.testing.assert_close(model(x), plain(x))
    model.close()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"optimizer_shard": "rank"}, "optimizer_shard must be 'group' or 'all', found 'rank'"),
        ({"stage": 2}, "found stage=2: give stage=3"),
        ({"update_in_backward": True}, "update_in_backward=True cannot go with optimizer_shard='all'"),
        ({"secondary_group_size": 2}, "secondary_group_size=2 cannot go with optimizer_shard='all'"),
        ({"reuse_fp16_shard": True}, "reuse_fp16_shard=True cannot go with optimizer_shard='all'"),
        ({"quantized_gradients": 8}, "quantized_gradients=8 cannot go with optimizer_shard='all'"),
        ({"quantized_weights": 4}, "quantized_weights=4 cannot go with optimizer_shard='all'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_go_with_states_over_all_ranks_is_refused_by_name(other: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**{"optimizer_shard": "all", "shard_group_size": 2, **other})
    with pytest.raises(ConfigError, match=words):
        load_config({"optimizer_shard": "all", "shard_group_size": 2, **other})
