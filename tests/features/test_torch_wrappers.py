"""torch's DDP, FSDP and fully_shard around a sharded model, its modules or what contains one: refused by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gemini import UnsupportedError
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo.mlp import WIDTH, inputs, sharded, train_step, weights_of


@contextmanager
def _a_group(world_size: int) -> Iterator[None]:
    """torch's wrappers want a process group on one rank too."""
    if world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if world_size == 1:
            dist.destroy_process_group()


class Outer(nn.Module):
    """A module that contains a sharded model beside layers of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x))
        return y


def _ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


def _ddp_that_does_not_broadcast(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, init_sync=False)


def _fsdp(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def _fsdp_of_original_parameters(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def _fully_shard(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return module


WRAPPERS: dict[Callable[[nn.Module], nn.Module], str] = {
    _ddp: "DistributedDataParallel",
    _ddp_that_does_not_broadcast: "DistributedDataParallel",
    _fsdp: "FullyShardedDataParallel",
    _fsdp_of_original_parameters: "FullyShardedDataParallel",
    _fully_shard: "fully_shard",
}
PARTS: tuple[Callable[[Any], nn.Module], ...] = (
    lambda model: model,
    lambda model: model.module,
    lambda model: model.module.layers[1],
    Outer,
)


# Before that it reads nothing of a parameter that could refuse.
FULLY_SHARD_ASKS = torch.__version__ >= "2.13"

# (where the state lies, stage)
ONE_RANK = [("cuda", 3), ("smallest", 3)]
TWO_RANKS = [("smallest", 3), ("cuda", 0)]


@pytest.mark.sampled(2)
@on_ranks_with("setting", {1: ONE_RANK, 2: TWO_RANKS})
def test_wrappers_that_shard_or_reduce_themselves_are_refused_by_name(
    rank: int, world_size: int, setting: tuple[str, int]
) -> None:
    """The model trains on as if nobody had tried."""
    place, stage = setting
    with _a_group(world_size):
        _every_wrapper_is_refused(place, stage)


def _every_wrapper_is_refused(place: str, stage: int) -> None:
    for wrapper, name in WRAPPERS.items():
        model, optimizer = sharded(place, stage=stage)
        for part in PARTS if wrapper is not _fully_shard else PARTS[:1]:
            _is_refused(wrapper, part(model), name, optimizer)
            if wrapper is not _fully_shard or FULLY_SHARD_ASKS:
                train_step(model, optimizer)
        model.close()
    for part in PARTS[1:]:  # torch keeps a state of its own for a module that `fully_shard` has seen
        model, optimizer = sharded(place, stage=stage)
        _is_refused(_fully_shard, part(model), "fully_shard", optimizer)
        model.close()


def _trains(wrapper: Callable[[nn.Module], nn.Module], module: nn.Module, optimizer: Any) -> None:
    wrapper(module)(inputs(0)).sum().backward()
    optimizer.step()  # the first to refuse where `fully_shard` asked nothing


def _is_refused(wrapper: Callable[[nn.Module], nn.Module], module: nn.Module, name: str, optimizer: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name}.* parameter '.*', .*: use the ShardedModel as it is") as told:
        _trains(wrapper, module, optimizer)
    assert "\n" not in str(told.value)
    assert ". " not in str(told.value)  # one sentence


@on_ranks(1, 2)
def test_modules_beside_a_sharded_model_may_be_wrapped(rank: int, world_size: int) -> None:
    """DDP around a head, and around a module of which it is told to ignore the sharded model's parameters."""
    with _a_group(world_size):
        _wrap_modules_beside(rank)


def _wrap_modules_beside(rank: int) -> None:
    model, optimizer = sharded()
    outer = Outer(model)
    ignored = [name for name, _ in outer.named_parameters() if name.startswith("inner.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, ignored)
    head = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    before = weights_of(model)
    for forward in (DistributedDataParallel(outer), lambda x: head(model(x))):
        forward(inputs(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = weights_of(model)
        assert all(not torch.equal(after[name], before[name]) for name in before)
        before = after
    model.close()
