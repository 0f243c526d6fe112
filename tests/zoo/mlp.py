"""A small perceptron whose every layer is one chunk, wrapped at each kind of placement, and its plain reference.

For tests of behaviour, where a model of milliseconds is enough: 6 layers, 6 chunks, 2 slots at the smallest budget.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, estimate_memory, state_hash
from optim import HybridAdam
from tests.harness.seed import seed

WIDTH = 16
LAYERS = 6
CHUNK_NUMEL = 512  # a weight of 256 elements and a bias, which starts on a multiple of 256

# where the state lives: arguments of ShardedModel
PLACES: dict[str, dict[str, Any]] = {
    "cuda": {"tensor_placement_policy": "cuda"},
    "cpu": {"tensor_placement_policy": "cpu"},
    "auto": {"model_data_memory": "half"},
    "smallest": {"model_data_memory": "smallest"},
}
everywhere = pytest.mark.parametrize("place", PLACES)
both_dtypes = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])


class Mlp(nn.Module):
    """Weights that are bf16 numbers, so that plain bf16 training starts from the same masters."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def build(make: Callable[[], nn.Module] = Mlp) -> Any:
    """The same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        seed(0)
        model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def inputs(step: int, dtype: torch.dtype | None = None) -> Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 + step))
    return x if dtype is None else x.to(dtype)


def loss_of(model: nn.Module, step: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    x = inputs(step, dtype)
    return (model(x) - x.flip(-1)).square().mean()


def smallest_budget(make: Callable[[], nn.Module] = Mlp, **arguments: Any) -> int:
    """The least model_data_memory that is accepted on all ranks there are."""
    return minimum_bytes(build(make), **arguments)


def minimum_bytes(module: nn.Module, **arguments: Any) -> int:
    """Of model data on the device; arguments: of ShardedModel."""
    group = arguments.pop("process_group", None)  # estimates ask nobody, and are told how many ranks there are
    world_size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    least = estimate_memory(module, world_size=world_size, **arguments).plan.minimum_bytes
    assert least is not None
    return least


def placed(make: Callable[[], nn.Module] = Mlp, **arguments: Any) -> dict[str, Any]:
    """Arguments of ShardedModel for `build(make)`: every layer is a chunk, and a budget may be "smallest"."""
    arguments = {"device": "emulated", "chunk_size": CHUNK_NUMEL, **arguments}
    if arguments.get("model_data_memory") == "smallest":
        del arguments["model_data_memory"]
        arguments["model_data_memory"] = smallest_budget(make, **arguments)
    return arguments


def wrap(place: str = "smallest", make: Callable[[], nn.Module] = Mlp, **arguments: Any) -> ShardedModel:
    arguments = {"chunk_size": CHUNK_NUMEL, **arguments}
    where = dict(PLACES[place])
    if where.get("model_data_memory") in ("smallest", "half"):
        least = smallest_budget(make, **arguments)
        state_bytes = 16 * CHUNK_NUMEL * len(list(build(make).parameters())) // 2
        where["model_data_memory"] = least if place == "smallest" else max(least, state_bytes // 2)
    return ShardedModel(build(make), device="emulated", **arguments, **where)


def sharded(place: str = "smallest", **arguments: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    model = wrap(place, **arguments)
    return model, ShardedOptimizer(model, adam(model.parameters()))


def plain(dtype: torch.dtype | None = None, make: Callable[[], nn.Module] = Mlp) -> tuple[Any, HybridAdam]:
    model = build(make)
    model = model if dtype is None else model.to(dtype)
    return model, adam(model.parameters())


def pairs(
    place: str = "smallest", dtype: torch.dtype | None = None, make: Callable[[], nn.Module] = Mlp
) -> list[tuple[Any, Any]]:
    """The same training twice: [(sharded model, its optimizer), (plain module, its optimizer)]."""
    return [sharded(place, dtype=dtype, make=make), plain(dtype, make)]


def adam(parameters: Iterator[nn.Parameter]) -> HybridAdam:
    return HybridAdam(parameters, lr=1e-2, weight_decay=0.01)


def train_step(model: nn.Module, optimizer: Any, step: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    loss = loss_of(model, step, dtype)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train_while(
    model: ShardedModel,
    optimizer: ShardedOptimizer,
    rank: int,
    between: Callable[[int, ShardedModel], None] | None = None,
    steps: int = 6,
    dtype: torch.dtype | None = None,
) -> tuple[list[float], int]:
    """Losses and the hash of all state, of steps with one micro-batch and with two; `between` them something happens.

    Closes the model.
    """
    losses = []
    for step in range(steps):
        for micro in range(1 + step % 2):
            loss = loss_of(model, 10 * step + 2 * micro + rank, dtype)
            optimizer.backward(loss)
            losses.append(float(loss.detach()))
        optimizer.step()
        if between is not None:
            between(step, model)
    found = losses, state_hash(model, optimizer)
    model.close()
    return found


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies under the plain names."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different, f"other bits: {', '.join(different)}"


def assert_same_models(both: list[tuple[Any, Any]]) -> None:
    """The two models of `pairs` have the same weights, bit for bit."""
    (model, _), (reference, _) = both
    assert_same(weights_of(model), weights_of(reference))


def layer_of(model: Any, number: int) -> nn.Linear:
    """A layer of a wrapped or of a plain model."""
    return (model.module if isinstance(model, ShardedModel) else model).layers[number]


def weight(model: Any, layer: int = 0) -> nn.Parameter:
    """A layer's weight, of a wrapped or of a plain model."""
    return layer_of(model, layer).weight


def train_beside_plain(
    model: ShardedModel,
    optimizer: ShardedOptimizer,
    reference: nn.Module,
    its: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, int, int], Tensor],
    rank: int,
    world_size: int,
    steps: int,
) -> None:
    """Steps of ranks, and of plain PyTorch, which takes the ranks' turns one after the other: the same bits.

    loss_of: of a module, a rank and a step.
    """
    for step in range(steps):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        for other in range(world_size):
            wanted = loss_of(reference, other, step)
            wanted.backward()
            assert other != rank or torch.equal(loss, wanted)
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad /= world_size
        its.step()
        its.zero_grad()
        assert_same(weights_of(model), weights_of(reference))
