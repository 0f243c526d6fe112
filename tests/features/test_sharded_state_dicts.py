"""State dicts of `DTensor`s, as users of FSDP2 save and load them with `torch.distributed.checkpoint`."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from gemini import HybridAdam, ShardedModel, ShardedOptimizer, state_hash
from tests.harness.meshes import kept_mesh
from tests.harness.on_ranks import gathered, in_soak, on_ranks
from tests.zoo import divided
from tests.zoo.mlp import WIDTH, adam, both_dtypes, build, loss_of, train_step, weights_of, wrap

FULL = StateDictOptions(full_state_dict=True)


class Odd(nn.Module):
    """Numbers of rows that no ranks divide evenly, a tied weight, one without dimensions, a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.again = nn.Linear(WIDTH, 5, bias=False)
        self.again.weight = self.up.weight
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1, WIDTH), requires_grad=False)
        self.register_buffer("offset", torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(torch.tanh(self.up(x)) + self.again(x)) + self.shift + self.offset.mean()


def pair(dtype: torch.dtype | None = None, **options: Any) -> tuple[Any, ShardedOptimizer]:
    half = {} if dtype is None else {"dtype": dtype}
    model = wrap(make=Odd, chunk_size=128, **half, **options)
    return model, ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))


def is_row_shard(value: Any, world_size: int) -> bool:
    if not value.dim():
        return type(value) is Tensor
    is_shard = isinstance(value, DTensor) and value.placements == (Shard(0),)
    return is_shard and value.to_local().shape[0] <= -(-value.shape[0] // world_size)


@on_ranks(1, 2)
@both_dtypes
@pytest.mark.parametrize("of", ["model", "module"])
def test_a_training_goes_on_from_the_dtensors_that_torchs_checkpoint_saved(
    rank: int, world_size: int, dtype: torch.dtype | None, of: str
) -> None:
    model, optimizer = pair(dtype, tensor_placement_policy="cpu")
    for step in range(2):
        train_step(model, optimizer, 2 * step + rank, dtype=dtype)
    before = state_hash(model, optimizer)
    target = model if of == "model" else model.module
    with model.sharded_state_dicts():
        weights, states = get_state_dict(target, optimizer)
        assert state_hash(optimizer) == gathered(state_hash(optimizer))[0]
    whole = model.state_dict()
    for name, value in dict(model.named_parameters()).items():
        assert weights[name].shape == value.shape
        assert weights[name].dtype is torch.float32 or not value.requires_grad
        if world_size > 1:
            assert is_row_shard(weights[name], world_size), name
            entry = states["state"].get(name, {})
            assert all(is_row_shard(each, 2) for key, each in entry.items() if key != "step"), name
    assert type(weights["offset"]) is Tensor and weights["up.weight"] is weights["again.weight"]
    folder = Path(gathered(tempfile.mkdtemp())[0])
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder, no_dist=world_size == 1)
    assert state_hash(model, optimizer) == before
    assert all(type(value) is Tensor for value in model.state_dict().values())
    other, its = pair(dtype, stage=1)
    other_target = other if of == "model" else other.module
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with other.sharded_state_dicts():
        weights, states = get_state_dict(other_target, its)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder, no_dist=world_size == 1)
    set_state_dict(other_target, its, model_state_dict=weights, optim_state_dict=states)
    assert state_hash(other, its) == before
    for each, optimizer_ in ((model, optimizer), (other, its)):
        train_step(each, optimizer_, 4 + rank, dtype=dtype)
    assert state_hash(other, its) == state_hash(model, optimizer) != before
    with other.sharded_state_dicts():
        full = get_model_state_dict(other_target, options=FULL)
    assert all(type(value) is Tensor and value.shape == whole[name].shape for name, value in full.items())
    model.close()
    other.close()


@on_ranks(2)
def test_state_dicts_of_fsdp2_and_of_ours_load_into_one_another(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, names=("data",))
    theirs = build()
    for layer in theirs.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    its = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(2):
        loss_of(theirs, 2 * step + rank).backward()
        its.step()
        its.zero_grad()
    model = wrap("cpu")
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    weights, states = get_state_dict(theirs, its)
    set_state_dict(model, optimizer, model_state_dict=dict(weights), optim_state_dict=states)
    with model.sharded_state_dicts():
        own, own_states = get_state_dict(model, optimizer)
    for name, value in weights.items():
        assert own[name].placements == value.placements and torch.equal(own[name].to_local(), value.to_local()), name
        for state, tensor in states["state"][name].items():
            found = own_states["state"][name][state]
            assert torch.equal(getattr(found, "_local_tensor", found), getattr(tensor, "_local_tensor", tensor)), state
    train_step(model, optimizer, 4 + rank)
    with model.sharded_state_dicts():
        set_model_state_dict(theirs, get_model_state_dict(model))
    for name, value in get_model_state_dict(theirs, options=FULL).items():
        assert torch.equal(value, weights_of(model)[name]), name
    model.close()


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), *in_soak((4, 1), (1, 4))], ids=str)
def test_parts_of_tensors_and_rows_move_to_other_ranks(rank: int, world_size: int, shape: tuple[int, int]) -> None:
    """2 parts x 2 ranks of data: weights are divided by both, and go on where nothing is divided but by ZeRO."""
    mesh = kept_mesh(*shape)

    def built() -> nn.Module:
        net = divided.build()
        net.unused.requires_grad_(False)  # torch makes states of all that is trained before it loads
        return net

    net = divided.divided(mesh["tp"], built())
    model = ShardedModel(net, device_mesh=mesh["dp"], device="emulated", chunk_size=1024)
    optimizer = ShardedOptimizer(model, divided.adam(model.parameters()))
    for step in range(2):
        optimizer.backward(divided.loss_of(model, step, mesh["dp"].get_local_rank()))
        optimizer.step()
    before = state_hash(model, optimizer)
    with model.sharded_state_dicts():
        weights, states = get_state_dict(model, optimizer)
        assert state_hash(model, optimizer) == before
    sizes = gathered(sum(value.to_local().numel() for value in weights.values()))
    total = sum(value.numel() for value in weights.values())
    # 30 rows do not divide evenly, and norms are copies on the parts.
    assert max(sizes) < 1.1 * total / world_size
    folder = gathered(tempfile.mkdtemp())[0]
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    for is_divided in (False, True):
        net = divided.divided(mesh["tp"], built()) if is_divided else built()
        over = {"device_mesh": mesh["dp"]} if is_divided else {}
        other = ShardedModel(net, device="emulated", tensor_placement_policy="cpu", **over)
        its = ShardedOptimizer(other, divided.adam(other.parameters()))
        with other.sharded_state_dicts():
            weights, states = get_model_state_dict(other), get_optimizer_state_dict(other, its)
        dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        set_state_dict(other, its, model_state_dict=weights, optim_state_dict=states)
        assert state_hash(other, its) == before
        other.close()
    model.close()


@on_ranks(2)
def test_one_rank_cannot_keep_what_each_has_its_rows_of(rank: int, world_size: int) -> None:
    model = wrap("cpu")
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    with model.sharded_state_dicts():
        for each in (model, optimizer):
            with pytest.raises(ValueError, match=r"rank0_only=True inside sharded_state_dicts\(\)"):
                each.state_dict(rank0_only=True)
    assert bool(model.state_dict(rank0_only=True)) == (dist.get_rank() == 0)
    model.close()
