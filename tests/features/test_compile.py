"""`torch.compile` of modules inside a `ShardedModel`, of all of it, before and after it is wrapped."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, set_leaf_module
from tests import switches
from tests.harness.on_ranks import in_soak, on_ranks, on_ranks_with
from tests.zoo.compiled import (
    BLOCKS,
    STEPS,
    WAYS,
    WHOLE,
    Block,
    Counting,
    Net,
    compare,
    compile_blocks,
    compile_blocks_in_place,
)
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, adam, assert_same, build, smallest_budget, train_beside_plain, weights_of

pytestmark = pytest.mark.usefixtures("forgotten_graphs")


def batch(rank: int, step: int, ragged: bool = False) -> Tensor:
    """ragged: batches have other sizes on other ranks, so that these compile for other shapes."""
    size = 4 + (rank * (step + 1) if ragged else 0)
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


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


# (way to compile, before or after wrapping, stage, backend, at the smallest budget)
Setting = tuple[str, str, int, str, bool]
MOMENTS = ("before", "after")
BACKENDS = ("eager", "aot_eager", "inductor")
ONE_RANK: list[Setting] = [(way, when, 3, "counting", True) for way in WAYS for when in MOMENTS]
TWO_RANKS: list[Setting] = [
    ("in place", "after", 3, "counting", True),
    ("whole", "after", 3, "counting", False),
    ("blocks", "before", 2, "counting", True),
]
EVERY_ON_ONE = list(itertools.product(WAYS, MOMENTS, (3,), BACKENDS, (False, True)))
EVERY_ON_TWO = [
    (way, when, stage, backend, way not in WHOLE)
    for way, when, stage, backend in itertools.product(WAYS, MOMENTS, range(4), BACKENDS)
]


def assert_trains_like_plain(rank: int, world_size: int, setting: Setting, ragged: bool = False) -> ShardedModel:
    """Steps beside the same compiled plain module, which takes the ranks' batches one after the other."""
    way, when, stage, name, tight = setting
    make = TurnedNet if ragged else Net
    plain_backend, backend = (Counting() if name == "counting" else name for _ in range(2))
    compiles: dict[str, Any] = {"fullgraph": name == "counting"}
    wrap: dict[str, Any] = {"chunk_size": CHUNK_NUMEL, "stage": stage}
    if tight:
        wrap["model_data_memory"] = smallest_budget(lambda: WAYS[way](build(make)), **wrap)
    torch._dynamo.reset()
    reference = WAYS[way](build(make), backend=plain_backend, **compiles)
    its, wanted = adam(reference.parameters()), []
    for step in range(STEPS):
        losses = []
        for other in range(world_size):
            losses.append(reference(batch(other, step, ragged)).square().mean())
            losses[-1].backward()
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad /= world_size
        its.step()
        its.zero_grad()
        wanted.append((losses[rank].detach(), weights_of(reference)))
    torch._dynamo.reset()
    trained: Any
    if when == "before":
        trained = model = ShardedModel(WAYS[way](build(make), backend=backend, **compiles), device="emulated", **wrap)
    else:
        model = ShardedModel(build(make), device="emulated", **wrap)
        trained = WAYS[way](model, backend=backend, **compiles)
    optimizer = ShardedOptimizer(trained, adam(trained.parameters()))
    counts = []
    for step in range(STEPS):
        loss = trained(batch(rank, step, ragged)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, wanted[step][0])
        assert_same(weights_of(trained), wanted[step][1])
        counts.append(getattr(backend, "num_graphs", 0))
    if not ragged:  # otherwise the plain module compiles for all ranks' shapes
        assert counts == [getattr(plain_backend, "num_graphs", 0)] * STEPS
    assert len(model.operators) == (1 if way in WHOLE else 1 + BLOCKS)
    if stage == 3 and tight and way not in WHOLE:
        assert model.observer.counts["evict"] > STEPS
    model.close()
    return model


@pytest.mark.sampled(8)
@on_ranks_with("setting", {1: ONE_RANK, 2: TWO_RANKS}, soak={1: EVERY_ON_ONE, 2: EVERY_ON_TWO}, timeout_s=300)
def test_a_compiled_model_trains_like_the_compiled_plain_module_and_is_compiled_once(
    rank: int, world_size: int, setting: Setting
) -> None:
    assert_trains_like_plain(rank, world_size, setting)


@on_ranks_with("setting", {2: [("blocks", "before", 3, "eager", True)]}, soak={2: EVERY_ON_TWO}, timeout_s=300)
def test_ranks_whose_batches_choose_other_graphs_stay_together(rank: int, world_size: int, setting: Setting) -> None:
    assert_trains_like_plain(rank, world_size, setting, ragged=True)


@pytest.mark.parametrize("backend", ["aot_eager", *in_soak("inductor")])
def test_backends_that_trace_backward_too_get_the_same_bits(backend: str) -> None:
    model = compare(lambda: compile_blocks(build(Net), backend=backend))
    assert model.observer.counts["evict"] > STEPS


@on_ranks(1, 2)
def test_nothing_is_compiled_again_when_chunks_move_between_slots(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    backend = Counting()
    budget = smallest_budget(lambda: compile_blocks(build(Net)), chunk_size=CHUNK_NUMEL)
    module = compile_blocks_in_place(build(Net), backend=backend)
    model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL, model_data_memory=budget)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    counts = []
    for step in range(STEPS):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        counts.append(backend.num_graphs)
    assert model.observer.counts["evict"] > STEPS
    model.close()
    assert counts[0] > 0
    assert len(set(counts)) == 1


@on_ranks(1, 2)
def test_ranks_may_use_other_branches_inside_a_compiled_module(rank: int, world_size: int) -> None:
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
    train_beside_plain(model, optimizer, reference, its, switches.loss_of, rank, world_size, STEPS)
    model.close()
