"""spectral_norm, orthogonal, pruning and parametrizations of the user's: the bits of plain PyTorch, or refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

from gemini import GeminiError, ReleasedParameterError, ShardedModel, ShardedOptimizer, state_hash
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import PLACES, Mlp, adam, assert_same, build, loss_of, plain, sharded, train_step, weights_of, wrap


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Invertible(Symmetric):
    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old spectral_norm": utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "own with inverse": lambda layer: parametrize.register_parametrization(layer, "weight", Invertible()),
}
NEW_PARAMETERS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": utils.weight_norm,
}
WITH_BUFFERS = ["spectral_norm", "old spectral_norm", "prune"]


def put(kind: str, model: nn.Module, seed: int = 1) -> None:
    """Onto the second layer, with the same random numbers on every call."""
    layers: Any = (model.module if isinstance(model, ShardedModel) else model).layers
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the old ones
        torch.manual_seed(seed)
        (KINDS | NEW_PARAMETERS)[kind](layers[1])


def with_(kind: str, seed: int = 1) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Mlp()
        put(kind, module, seed)
        return module

    return make


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["smallest", "cuda"])
@pytest.mark.parametrize("kind", KINDS | NEW_PARAMETERS)
def test_a_parametrization_put_on_before_wrapping_trains_as_in_plain_pytorch(kind: str, place: str) -> None:
    (model, optimizer), (reference, plain_optimizer) = sharded(place, make=with_(kind)), plain(make=with_(kind))
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), dict(reference.state_dict()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_optimizer", [False, True], ids=["before the optimizer", "after it"])
def test_a_parametrization_put_on_after_wrapping_trains_as_in_plain_pytorch(
    kind: str, place: str, has_optimizer: bool
) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    if has_optimizer:
        train_step(model, optimizer)
        train_step(reference, plain_optimizer)
    for each in (model, reference):
        put(kind, each)
    assert torch.equal(loss_of(model), loss_of(reference))
    for step in range(1, 4):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), dict(reference.state_dict()))


@pytest.mark.parametrize("kind", NEW_PARAMETERS)
def test_one_that_makes_new_parameters_is_refused_after_wrapping(kind: str) -> None:
    model, _ = sharded()
    with pytest.raises(ReleasedParameterError, match=r"'layers\.1\.weight'.* weight_norm.* before ShardedModel"):
        put(kind, model)
    if kind == "weight_norm":  # the deprecated one has taken the weight out of its module by then
        assert_same(weights_of(model), dict(build().state_dict()))


def test_what_set_gives_a_parameter_are_values() -> None:
    model, reference = sharded()[0], build(Mlp)
    with torch.no_grad():
        for each in (model, reference):
            each.layers[0].weight.set_(torch.ones_like(each.layers[0].bias).expand(16, 16).clone())
    assert_same(weights_of(model), dict(reference.state_dict()))
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight' is \(16, 16\)"):
        model.layers[0].weight.set_(torch.zeros(3))
    with pytest.raises(ReleasedParameterError, match=r"set_ to a storage of parameter 'layers\.0\.weight'"):
        model.layers[0].weight.set_(torch.zeros(256).untyped_storage(), 0, (16, 16), (16, 1))
    with pytest.raises(ReleasedParameterError, match=r"memory of 'layers\.1\.weight'"):
        model.layers[0].weight.set_(model.layers[1].weight)


@on_ranks(2)
@pytest.mark.parametrize("kind", WITH_BUFFERS)
def test_put_on_before_wrapping_their_buffers_are_rank_0s(rank: int, world_size: int, kind: str) -> None:
    """Every rank draws other random numbers; what all train is rank 0's."""
    model = wrap(make=with_(kind, seed=rank))
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    reference = build(with_(kind, seed=0))
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in model.state_dict().items())
    for step in range(2):
        train_step(model, optimizer, step)
    assert len(set(gathered(state_hash(model, optimizer)))) == 1
    model.close()


@on_ranks(2)
@pytest.mark.parametrize("kind", WITH_BUFFERS)
def test_put_on_after_wrapping_by_several_ranks_they_are_refused_on_all(rank: int, world_size: int, kind: str) -> None:
    model = wrap()
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer)
    put(kind, model, seed=rank)
    loss_of(model, 1).backward()
    with pytest.raises(GeminiError, match=r"'layers\.1\.weight' became 'layers\.1\.") as refused:
        optimizer.step()
    assert "before it is wrapped" in str(refused.value)
    optimizer.zero_grad()
    model.close()
