"""Compiled modules on several ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from gemini import DivergenceError, RemoteRankError, ShardedModel, ShardedOptimizer, set_leaf_module
from tests import switches
from tests.compiled import BLOCKS, WAYS, Block, Counting, Net, compile_blocks, compile_blocks_in_place
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, adam, assert_same, build, smallest_budget, weights_of

STEPS = 4


def inputs(rank: int, step: int, ragged: bool) -> Tensor:
    """ragged: batches have other sizes on other ranks, so that these compile for other shapes."""
    batch = 4 + (rank * (step + 1) if ragged else 0)
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


class Turned(Block):
    """The order in which its parameters are used follows from the size of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            return self.norm(x + self.gain * self.down(torch.tanh(self.up(x))))
        return super().forward(x)


class TurnedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Turned() for _ in range(BLOCKS))


def trains(
    rank: int, world_size: int, way: str, when: str, stage: int, backend: str, tight: bool, ragged: bool = False
) -> int:
    """Steps beside the same compiled plain module, which takes the ranks' batches one after the other. Evictions."""
    torch._dynamo.reset()
    make = TurnedNet if ragged else Net
    wrap: dict[str, Any] = {"chunk_size": CHUNK_NUMEL, "stage": stage}
    if tight:
        wrap["model_data_memory"] = smallest_budget(lambda: WAYS[way](build(make)), **wrap)
    reference = WAYS[way](build(make), backend=backend)
    trained: Any
    if when == "before":
        trained = model = ShardedModel(WAYS[way](build(make), backend=backend), device="emulated", **wrap)
    else:
        model = ShardedModel(build(make), device="emulated", **wrap)
        trained = WAYS[way](model, backend=backend)
    optimizer, its = ShardedOptimizer(trained, adam(trained.parameters())), adam(reference.parameters())
    for step in range(STEPS):
        loss = trained(inputs(rank, step, ragged)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for other in range(world_size):
            wanted = reference(inputs(other, step, ragged)).square().mean()
            wanted.backward()
            assert other != rank or torch.equal(loss, wanted)
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad /= world_size
        its.step()
        its.zero_grad()
        assert_same(weights_of(trained), weights_of(reference))
    num_evictions = model.observer.counts["evict"]
    model.close()
    return num_evictions


def recompiles(rank: int, world_size: int) -> list[int]:
    """Graphs after each step at the smallest budget."""
    torch._dynamo.reset()
    backend = Counting()
    budget = smallest_budget(lambda: compile_blocks(build(Net)), chunk_size=CHUNK_NUMEL)
    module = compile_blocks_in_place(build(Net), backend=backend)
    model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL, model_data_memory=budget)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    counts = []
    for step in range(STEPS):
        model(inputs(rank, step, False)).square().mean().backward()
        optimizer.step()
        counts.append(backend.num_graphs)
    assert model.observer.counts["evict"] > STEPS
    model.close()
    return counts


def compiled_switch(rank: int, world_size: int) -> None:
    """Ranks use other branches of a module that is compiled together with what is around it."""
    torch._dynamo.reset()

    def make() -> nn.Module:
        net = switches.Net("")
        set_leaf_module(net, switches.Switch)
        for block in net.blocks:
            block.compile(backend="eager")
        return net

    budget = smallest_budget(make, chunk_size=CHUNK_NUMEL)
    model = ShardedModel(build(make), device="emulated", chunk_size=CHUNK_NUMEL, model_data_memory=budget)
    reference = build(make)
    optimizer, its = ShardedOptimizer(model, adam(model.parameters())), adam(reference.parameters())
    for step in range(STEPS):
        switches.turn(model, rank, step)
        loss = model(switches.inputs(rank, step))
        loss.backward()
        optimizer.step()
        for other in range(world_size):
            switches.turn(reference, other, step)
            wanted = reference(switches.inputs(other, step))
            wanted.backward()
            assert other != rank or torch.equal(loss, wanted)
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad /= world_size
        its.step()
        its.zero_grad()
        assert_same(weights_of(model), weights_of(reference))
    model.close()


def ranks_compile_others(rank: int, world_size: int, alone: bool) -> str:
    """What a rank is told if other ranks compile other blocks of the wrapped model, or alone: only rank 0 one."""
    model: Any = ShardedModel(build(Net), device="emulated", chunk_size=CHUNK_NUMEL)
    if rank == 0 or not alone:
        model.h[rank].compile(backend="eager")
    try:
        model(inputs(rank, 1, False))
    except (DivergenceError, RemoteRankError) as error:
        return str(error)
    return ""
