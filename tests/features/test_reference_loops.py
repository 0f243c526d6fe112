"""What users copy from labml's, OneFlow's and a ZeRO-and-FSDP page, with imports changed, on two ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import gemini
from gemini import ShardedModel, ShardedOptimizer, state_hash
from optim import HybridAdam
from tests.harness.on_ranks import average_gradients, on_ranks
from tests.zoo.mlp import WIDTH, Mlp, assert_same, build, inputs, weights_of


def layers(num_layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)))


@on_ranks(2)
def test_labmls_sequential_of_layers_trains_its_last_ones(rank: int, world_size: int) -> None:
    """`Zero3Sequential` of `Zero3Layer`s is the wrapped sequential; its trainable chunks are parameters that learn."""
    module, plain = build(layers), build(layers)
    for each in (module, plain):
        each[:2].requires_grad_(False)
    model = ShardedModel(module, device="emulated")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ShardedOptimizer(model, HybridAdam(trainable, lr=1e-2))
    its = HybridAdam([parameter for parameter in plain.parameters() if parameter.requires_grad], lr=1e-2)
    for step in range(3):
        x = inputs(2 * step + rank)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        other = plain(x).square().mean()
        other.backward()
        average_gradients(plain)
        its.step()
        its.zero_grad()
        assert torch.equal(loss, other)
    assert_same(weights_of(model), weights_of(plain))


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 10))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_oneflows_training_trains_and_predicts_at_every_stage(rank: int, world_size: int, stage: int) -> None:
    """Its model, loss and optimizer, with `enable_zero(True, stage=...)` as the stage of the config."""
    module = build(two_linears)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    engine, *_ = gemini.initialize(module, optimizer, nn.CrossEntropyLoss(), config={"stage": stage}, verbose=False)
    model = ShardedModel(build(two_linears), stage=stage)
    by_hand = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    plain = build(two_linears)
    its = torch.optim.SGD(plain.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    for step in range(3):
        x = torch.randn(128, 256, generator=torch.Generator().manual_seed(2 * step + rank))
        y = torch.ones(128, dtype=torch.int64)
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        same = loss_fn(model(x), y)
        same.backward()
        by_hand.step()
        loss_fn(plain(x), y).backward()
        average_gradients(plain)
        its.step()
        its.zero_grad()
        assert torch.equal(loss, same)
    assert state_hash(engine.model) == state_hash(model)
    with torch.no_grad():  # with nothing configured for it
        # torch's fused SGD on a whole chunk and on single tensors: a contracted multiply and add rounds otherwise
        torch.testing.assert_close(engine.eval()(x), plain(x), rtol=1e-5, atol=1e-6)


LossFn = Callable[[Tensor, Tensor], Tensor]


class Zero:
    """The page's classes `ZeRO_1` to `ZeRO_3`, which make the optimizer and have the loop of a step."""

    def __init__(self, model: nn.Module, optimizer_cls: type[HybridAdam], stage: int) -> None:
        self.model = ShardedModel(model, stage=stage)
        self.optimizer = ShardedOptimizer(self.model, optimizer_cls(self.model.parameters()))

    def training_step(self, x: Tensor, targets: Tensor, loss_fn: LossFn) -> None:
        loss_fn(self.model(x), targets).backward()
        self.optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_hand_written_zero_of_every_stage_trains_as_data_parallel(rank: int, world_size: int, stage: int) -> None:
    zero = Zero(build(), HybridAdam, stage)
    plain = build()
    its = HybridAdam(plain.parameters())
    for step in range(3):
        x = inputs(2 * step + rank)
        zero.training_step(x, x.flip(-1), nn.functional.mse_loss)
        nn.functional.mse_loss(plain(x), x.flip(-1)).backward()
        average_gradients(plain)
        its.step()
        its.zero_grad()
    assert_same(weights_of(zero.model), weights_of(plain))


@on_ranks(2)
def test_a_loop_for_fully_shard_trains_the_same_with_one_wrap(rank: int, world_size: int) -> None:
    """`fully_shard` on each layer and on the model becomes `ShardedModel`, once; the loop stays."""
    sharded: Mlp = build()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    model = ShardedModel(build(), device="emulated")
    its = torch.optim.AdamW(sharded.parameters(), lr=1e-2, eps=1e-4)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01))
    for step in range(3):
        x = inputs(2 * step + rank)
        losses = []
        for each, its_optimizer in ((model, optimizer), (sharded, its)):
            loss = (each(x) - x.flip(-1)).square().mean()
            loss.backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
            losses.append(loss.detach())
        # torch's AdamW contracts multiply and add, ours rounds each operation
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
