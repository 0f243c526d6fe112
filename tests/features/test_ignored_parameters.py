"""`ignored_parameters`: in no chunk, with each rank's own values and gradients, for another optimizer."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from gemini import ShardedModel, ShardedOptimizer, UnsupportedError, ZeroInitContext, estimate_memory
from gemini.engine.config import load_config
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, Mlp, adam, assert_same, build, layer_of, loss_of, weights_of

IGNORED = ("layers.2.*", "layers.4.bias")
CONFIG = load_config({"ignored_parameters": list(IGNORED), "device": "emulated", "chunk_size": CHUNK_NUMEL})


def own(module: Any) -> list[nn.Parameter]:
    """The ignored parameters of a plain or wrapped model."""
    return [layer_of(module, 2).weight, layer_of(module, 2).bias, layer_of(module, 4).bias]


def others(module: nn.Module) -> list[nn.Parameter]:
    ignored = {id(parameter) for parameter in own(module)}
    return [parameter for parameter in module.parameters() if id(parameter) not in ignored]


def optimizers(module: Any) -> list[Any]:
    both = [adam(iter(others(module))), torch.optim.SGD(own(module), lr=0.1, momentum=0.9)]
    return [ShardedOptimizer(module, both[0]), both[1]] if isinstance(module, ShardedModel) else both


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_ignored_parameters_are_left_to_the_user(rank: int, world_size: int, policy: str) -> None:
    """As in plain PyTorch with two optimizers. All ranks see the same data: a mean is each one's own, to the bit."""
    module, plain = build(), build()
    memory = [parameter.data_ptr() for parameter in own(module)]
    model = ShardedModel(module, settings=CONFIG.settings(), tensor_placement_policy=policy)
    assert [parameter.data_ptr() for parameter in own(model)] == memory
    assert [type(parameter) for parameter in own(model)] == [nn.Parameter] * 3
    packed = sum(len(chunk.parameters) for chunk in model.chunk_manager.chunks)
    assert packed == len(others(plain)) == len(list(plain.parameters())) - 3
    pairs = list(zip((model, plain), (optimizers(model), optimizers(plain)), strict=True))
    for step in range(6):
        for each, its in pairs:
            for micro in range(1 + step % 2):
                loss_of(each, 2 * step + micro).backward()
            if step == 3:
                each.zero_grad()
            for optimizer in its:
                optimizer.step()
            if step == 4:
                its[0].zero_grad()
                assert all(parameter.grad is not None for parameter in own(each)), "another optimizer's"
            each.zero_grad()
            assert all(parameter.grad is None for parameter in own(each))
    assert_same(weights_of(model), weights_of(plain))
    assert_same(weights_of(copy.deepcopy(model)), weights_of(plain))
    model.load_state_dict({name: value + 1 for name, value in weights_of(plain).items()})
    assert [parameter.data_ptr() for parameter in own(model)] == memory
    assert_same(weights_of(model), {name: value + 1 for name, value in weights_of(plain).items()})


@on_ranks(2)
def test_ranks_keep_values_and_gradients_of_their_own(rank: int, world_size: int) -> None:
    module = build()
    with torch.no_grad():
        layer_of(module, 2).bias.fill_(rank)
        layer_of(module, 1).bias.fill_(rank)
    model = ShardedModel(module, settings=CONFIG.settings())
    loss_of(model, rank).backward()
    grads = gathered(layer_of(model, 2).weight.grad)
    assert not torch.equal(grads[0], grads[1])
    bias = model.state_dict()
    assert bias["layers.2.bias"].tolist() == [rank] * 16
    assert bias["layers.1.bias"].tolist() == [0] * 16, "rank 0's, as of all that is shared"


def test_what_ignoring_cannot_do_is_refused_by_name() -> None:
    model = ShardedModel(build(), settings=CONFIG.settings())
    with pytest.raises(ValueError, match=r"not this model's.* without those of ignored_parameters="):
        ShardedOptimizer(model, adam(model.parameters()))
    with pytest.raises(ValueError, match=r"ignored_parameters: no parameter has the name 'layer\.1\.\*'"):
        ShardedModel(build(), device="emulated", ignored_parameters=["layer.1.*", "layers.1.bias"])
    with pytest.raises(TypeError, match=r"ignored_parameters must be a list of names of parameters, found 'head'"):
        estimate_memory(build(), ignored_parameters="head")
    with ZeroInitContext():
        module = Mlp()
    with pytest.raises(UnsupportedError, match=r"'layers\.2\.weight', which was built on shards"):
        ShardedModel(module, device="emulated", ignored_parameters=["layers.2.weight"])


def test_an_estimate_counts_no_chunks_for_them() -> None:
    whole, some = (
        estimate_memory(build(), chunk_size=CHUNK_NUMEL, ignored_parameters=names) for names in ((), IGNORED)
    )
    assert whole.state_bytes - some.state_bytes == 16 * (CHUNK_NUMEL + 256), "a layer and a bias, with their padding"


def test_a_quantised_weight_that_is_ignored_stays_as_it_is() -> None:
    """Such a tensor has no memory of its own, as torchao's int8 tensors beside adapters."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(8, 8)
            self.base = nn.Linear(8, 8, bias=False)
            self.base.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
            self.down, self.up = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.zeros(2, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = self.base(x)
            return getattr(base, "a", base) + x @ self.down @ self.up

    def trained(wraps: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(Adapted(), nn.GELU(), Adapted())
        model: nn.Module = ShardedModel(module, ignored_parameters=["*base.weight"]) if wraps else module
        plain = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        optimizer: Any = ShardedOptimizer(model, plain) if isinstance(model, ShardedModel) else plain
        for _ in range(2):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: each.detach().clone() for name, each in module.named_parameters() if each.requires_grad}

    expected, found = trained(False), trained(True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
