"""A sharded model as a part of a plain one, which has parameters and an optimizer of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import mlp
from tests.zoo.mlp import WIDTH, assert_same
from tests.zoo.parts import Pair, everywhere_and_on_three


@pytest.mark.sampled(4)
@everywhere_and_on_three
def test_a_plain_head_trains_on_a_sharded_trunk(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A plain head with an optimizer of its own, on a sharded trunk that is a part of a plain module."""
    dtype = wrap.get("dtype")

    class Whole(nn.Module):
        def __init__(self, trunk: nn.Module) -> None:
            super().__init__()
            self.trunk = trunk
            self.head = nn.Linear(WIDTH, 3, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.trunk(x))

    pair = Pair(rank, world_size, wrap, mlp.Mlp)
    wholes = []
    for trunk in (pair.model, pair.plain):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            wholes.append(Whole(trunk))
    heads = [mlp.adam(whole.head.parameters()) for whole in wholes]
    same = [0] if dtype is not None else list(range(world_size))
    for step in range(3):
        losses = []
        for other in [rank if dtype is None else 0, *same]:
            whole = wholes[len(losses) > 0]
            loss = whole(mlp.inputs(10 * step + other, dtype)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(losses[0], losses[1 + (rank if dtype is None else 0)])
        for parameter in wholes[0].head.parameters():
            if world_size > 1 and dtype is None:
                parts = [torch.empty_like(parameter.grad) for _ in range(world_size)]
                torch.distributed.all_gather(parts, parameter.grad)
                parameter.grad = sum(parts[1:], start=parts[0]) / world_size
        for parameter in wholes[1].parameters():
            if dtype is None:
                parameter.grad /= world_size
        for head in heads:
            head.step()
            head.zero_grad()
        pair.step()
    state, wanted = (dict(whole.state_dict()) for whole in wholes)
    assert_same(state, wanted)
    changed = {name: _value_like(value, place) for place, (name, value) in enumerate(wanted.items())}
    for whole in wholes:
        found = whole.load_state_dict(changed)
        assert not found.missing_keys and not found.unexpected_keys
        assert_same(dict(whole.state_dict()), changed)
    pair.backward(7)
    pair.step()
    some = {name: value for name, value in changed.items() if name != "trunk.layers.1.bias"}
    with pytest.raises(RuntimeError, match=r"trunk\.layers\.1\.bias.*\n.*trunk\.more"):
        wholes[0].load_state_dict(some | {"trunk.more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"layers\.1\.bias has shape"):
        wholes[0].load_state_dict(some | {"trunk.layers.1.bias": torch.zeros(1)})
    pair.model.close()


def _value_like(value: Tensor, seed: int) -> Tensor:
    """bf16 numbers."""
    drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.bfloat16().to(value.dtype)
