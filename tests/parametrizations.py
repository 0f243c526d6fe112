"""Parametrizations and pruning of torch.nn.utils, put onto a module before or after it is wrapped."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

from gemini import GeminiError, ShardedModel, ShardedOptimizer, state_hash
from tests.mlp import Mlp, adam, build, loss_of, train_step, wrap


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


def before_wrapping(rank: int, world_size: int, kind: str) -> str:
    """Every rank draws other random numbers; what all train is rank 0's."""
    model = wrap(make=with_(kind, seed=rank))
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    plain = build(with_(kind, seed=0))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    for step in range(2):
        train_step(model, optimizer, step)
    state = state_hash(model, optimizer)
    model.close()
    return state


def after_wrapping(rank: int, world_size: int, kind: str) -> str:
    """What several ranks are told."""
    model = wrap()
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer)
    put(kind, model, seed=rank)
    loss_of(model, 1).backward()
    try:
        optimizer.step()
    except GeminiError as error:
        return str(error)
    finally:
        optimizer.zero_grad()
        model.close()
    return ""
