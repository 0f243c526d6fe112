"""A chunk of more small parameters than gradients wait: they are copied while the backward runs, to the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import ShardedModel, ShardedOptimizer
from tests.harness.on_ranks import on_ranks_with
from tests.small_parameters import WIDTH, loss_of, raw_grads
from tests.zoo import mlp

LAYERS = 280
AGAIN = (5, 12, 250)  # two of them late in the backward, among gradients that wait together
MOST = 256


class LongChain(nn.Module):
    """One layer runs again and again, each time with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.again: tuple[int, ...] = AGAIN
        self.most_waiting = 0

    def forward(self, x: Tensor, used: slice = slice(None)) -> Tensor:
        for number, layer in enumerate(self.layers[used]):
            x = torch.tanh(layer(x)) * 0.1 + x
            if number in self.again:
                x = checkpoint(self.shared, x, use_reentrant=True)
            if number % 20 == 0 and x.requires_grad:
                x.register_hook(self._look)
        return x

    def _look(self, grad: Tensor) -> None:
        self.most_waiting = max(self.most_waiting, raw_grads(self))


def pairs(**arguments: Any) -> list[tuple[Any, Any]]:
    model = ShardedModel(mlp.build(LongChain), device="emulated", chunk_size=2**20, **arguments)
    assert [len(chunk.parameters) > 2 * MOST for chunk in model.chunk_manager.chunks] == [True]
    plain = mlp.build(LongChain)
    return [(model, ShardedOptimizer(model, mlp.adam(model.parameters()))), (plain, mlp.adam(plain.parameters()))]


def train(both: list[tuple[Any, Any]], micro_batches: int) -> None:
    for step in range(3):
        for model, optimizer in both:
            for micro_batch in range(1 + step % micro_batches):
                loss_of(model, 10 * step + micro_batch, used=slice(step % 3, LAYERS - step)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_of_a_layer_that_comes_back_add_up_as_in_plain_pytorch() -> None:
    both = pairs()
    train(both, micro_batches=2)
    mlp.assert_same_models(both)
    assert raw_grads(both[0][0]) == 0


@pytest.mark.sampled(2)
@on_ranks_with("stage", {2: [1, 3]})
def test_on_two_ranks_alike_data_trains_as_one_process(rank: int, world_size: int, stage: int) -> None:
    both = pairs(stage=stage)
    train(both, micro_batches=1)
    mlp.assert_same_models(both)
    assert raw_grads(both[0][0]) == 0
    assert both[0][0].module.most_waiting <= MOST


def test_only_some_gradients_are_held_twice() -> None:
    (model, _), _ = pairs()
    for step in range(2):
        loss_of(model, step).backward()
    assert 0 < model.module.most_waiting <= MOST


def test_a_backward_that_fails_between_two_copies_leaves_nothing_behind() -> None:
    (model, optimizer), reference = both = pairs()

    def fail(*_: Any) -> None:
        raise ValueError("stopped")

    handle = model.module.layers[60].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="stopped"):
        loss_of(model, 5).backward()
    handle.remove()
    with pytest.warns(UserWarning, match="a backward ended with an exception"):
        loss_of(model, 4)
    train(both, micro_batches=1)
    mlp.assert_same_models([(model, optimizer), reference])


def test_a_gradient_that_was_copied_is_read_while_others_wait() -> None:
    (model, _), _ = pairs()
    model.module.again = ()
    found: list[bool] = []
    last = model.module.layers[LAYERS - 1].weight
    model.module.layers[20].register_full_backward_hook(lambda *_: found.append(last.grad is not None))
    loss_of(model, 0).backward()
    assert found == [True]
