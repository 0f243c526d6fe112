"""`TiledLinear`: a linear layer in tiles gives what the whole layer gives, and needs one tile's memory.

Weights, inputs and gradients of the comparisons are small integers: sums of their products are exact in fp32 in any
order, so a layer in tiles has the bits of the whole one, whatever its splits are. Where values are rounded, only the
order in which partial sums are added differs.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import GatheredParameters, ShardedModel, ShardedOptimizer, TiledLinear, ZeroInitContext, deepspeed
from optim import HybridAdam
from tests.harness.on_ranks import average_gradients, on_ranks
from tests.zoo.mlp import assert_same, minimum_bytes, weights_of

SPLITS = [(1, 1), (1, 4), (3, 1), (3, 4), (7, 5), (37, 53)]
IN, OUT = 37, 53  # primes: no split but the whole one is even


def integers(*shape: int, key: int = 0) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(key)).float()


def whole_layer(bias: bool = True) -> nn.Linear:
    layer = nn.Linear(IN, OUT, bias=bias)
    with torch.no_grad():
        for key, parameter in enumerate(layer.parameters()):
            parameter.copy_(integers(*parameter.shape, key=key))
    return layer


def whole_of(layer: TiledLinear, which: str) -> list[Tensor]:
    """Weight and bias put together from the tiles: `which` is "data" or "grad"."""
    rows = [[getattr(tile.weight, which) for tile in row] for row in layer.linears]
    found = [torch.cat([torch.cat(row, dim=1) for row in rows])]
    if layer.use_bias:
        found.append(torch.cat([getattr(row[-1].bias, which) for row in layer.linears]))
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), SPLITS)
def test_a_layer_in_uneven_tiles_gives_what_the_whole_layer_gives(in_splits: int, out_splits: int, bias: bool) -> None:
    whole = whole_layer(bias)
    tiled = TiledLinear(IN, OUT, bias, in_splits, out_splits, init_linear=whole)
    inputs = [integers(2, 3, IN, key=5).requires_grad_() for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((whole, tiled), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward(integers(2, 3, OUT, key=6))
    assert torch.equal(*(x.grad for x in inputs))
    for which in ("data", "grad"):
        for mine, parameter in zip(whole_of(tiled, which), whole.parameters(), strict=True):
            assert torch.equal(mine, getattr(parameter, which))
    assert sum(parameter.numel() for parameter in tiled.parameters()) == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("out_splits", [1, 5])
def test_without_splits_of_the_input_rounded_outputs_have_the_bits_of_the_whole_layer(out_splits: int) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(256, 1000)
    x = torch.randn(8, 256)
    assert torch.equal(TiledLinear(256, 1000, out_splits=out_splits, init_linear=whole)(x), whole(x))


def test_partial_sums_of_split_inputs_differ_by_the_order_of_addition_only() -> None:
    """In fp64 by a few units of the last place: n products of |w x| <= 1 are off by n eps at most in either order."""
    torch.manual_seed(0)
    whole = nn.Linear(512, 96, dtype=torch.float64)
    x = torch.rand(8, 512, dtype=torch.float64)
    tiled = TiledLinear(512, 96, in_splits=7, out_splits=5, init_linear=whole, dtype=torch.float64)
    assert (tiled(x) - whole(x)).abs().max() <= 512 * torch.finfo(torch.float64).eps


def test_inputs_may_come_and_outputs_go_in_parts() -> None:
    whole = whole_layer()
    x = integers(4, IN, key=5)
    tiled = TiledLinear(
        IN, OUT, in_splits=3, out_splits=4, input_is_already_split=True, combine_out_splits=False, init_linear=whole
    )
    assert tiled.in_parts == [0, 13, 25, 37] and tiled.out_parts == [0, 14, 27, 40, 53]
    outputs = tiled(x.split([13, 12, 12], dim=-1))
    assert [output.shape[-1] for output in outputs] == [14, 13, 13, 13]
    assert torch.equal(torch.cat(outputs, dim=-1), whole(x))
    alone = TiledLinear(IN, OUT, input_is_already_split=True, init_linear=whole)
    assert torch.equal(alone(x), whole(x)) and torch.equal(alone([x]), whole(x))


class Doubled(nn.Linear):
    """A user's own layer, with an argument of its own."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, factor: float = 1.0) -> None:
        super().__init__(in_features, out_features, bias)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def test_tiles_are_of_a_class_of_the_users_with_its_arguments() -> None:
    whole = whole_layer()
    tiled = TiledLinear(IN, OUT, in_splits=2, out_splits=3, linear_cls=Doubled, init_linear=whole, factor=2.0)
    assert {type(tile) for row in tiled.linears for tile in row} == {Doubled}
    x = integers(4, IN, key=5)
    assert torch.equal(tiled(x), 2 * whole(x))
    half = TiledLinear(IN, OUT, out_splits=3, dtype=torch.bfloat16, device="meta")
    assert {(each.dtype, each.is_meta) for each in half.parameters()} == {(torch.bfloat16, True)}


def test_tiles_start_within_the_bound_of_the_whole_layer() -> None:
    torch.manual_seed(0)
    tiled = TiledLinear(1024, 64, in_splits=16)
    assert all(0.9 / 32 < parameter.abs().max() <= 1 / 32 for parameter in tiled.parameters())


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"in_splits": 0}, "in_splits=0 must be at least 1 and at most in_features=37"),
        ({"out_splits": 54}, "out_splits=54 must be at least 1 and at most out_features=53"),
    ],
)
def test_more_tiles_than_features_are_refused(splits: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TiledLinear(IN, OUT, **splits)


@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [
        ({"in_splits": 2}, torch.ones(2, 36), "last dimension is 36, not 37"),
        ({"in_splits": 2}, [torch.ones(2, 18)], "takes one tensor, found"),
        ({"in_splits": 2, "input_is_already_split": True}, torch.ones(2, 37), r"last dimensions \[19, 18\], found"),
        ({"in_splits": 2, "input_is_already_split": True}, [torch.ones(2, 18)], r"last dimensions \[19, 18\], found"),
    ],
)
def test_an_input_of_another_size_is_refused_with_what_was_found(
    arguments: dict[str, Any], given: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        TiledLinear(IN, OUT, **arguments)(given)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(IN, 5), r"a weight of shape \(53, 37\), found \(5, 37\)"),
        (nn.Linear(IN, OUT, bias=False), r"a bias of shape \(53,\), found none"),
        (nn.ReLU(), "found none"),
    ],
)
def test_values_of_another_layer_are_refused_before_any_is_copied(other: nn.Module, words: str) -> None:
    tiled = TiledLinear(IN, OUT, in_splits=2)
    before = whole_of(tiled, "data")
    with pytest.raises(ValueError, match=words):
        tiled.copy_params_from(other)
    assert all(map(torch.equal, before, whole_of(tiled, "data")))
    with pytest.raises(ValueError, match="a bias of none, found one"):
        TiledLinear(IN, OUT, bias=False).copy_params_from(whole_layer())


def test_the_class_is_under_each_of_its_names() -> None:
    there: Any = importlib.import_module("gemini.deepspeed.runtime.zero.tiling")
    assert TiledLinear is deepspeed.zero.TiledLinear is there.TiledLinear is gemini.TiledLinear
    with pytest.raises(AttributeError, match="may return its bias"):
        _ = there.TiledLinearReturnBias


# ---- sharded ------------------------------------------------------------------------------------------------------

WIDE = 4096


def tiles_of(splits: int) -> nn.Module:
    """Two wide layers between narrow activations; splits of 1 are the whole layers."""
    torch.manual_seed(0)
    grow = TiledLinear(32, WIDE, out_splits=splits)
    shrink = TiledLinear(WIDE, 32, in_splits=splits)
    return nn.Sequential(grow, nn.Tanh(), shrink)


def loss_of(model: Callable[[Tensor], Tensor], step: int, rank: int) -> Tensor:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - x.flip(-1)).square().mean()


def train(module: nn.Module, rank: int, steps: int = 3) -> ShardedModel:
    """At the least budget there is, which is measured, too."""
    least = minimum_bytes(module)
    model = ShardedModel(module, device="emulated", model_data_memory=least)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
    for step in range(steps):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@on_ranks(1, 2)
def test_one_tile_of_a_layer_is_on_the_device_at_a_time(rank: int, world_size: int) -> None:
    tile_bytes = 4 * 32 * WIDE // 16
    peaks = {}
    for splits in (1, 16):
        model = train(tiles_of(splits), rank)
        peaks[splits] = model.chunk_manager.memory.device.ledger.peak_bytes
        assert peaks[splits] <= model.plan.budget_bytes
    # One payload and one gradient with their paddings; several ranks also hold what travels, of one tile.
    assert peaks[1] >= 16 * tile_bytes
    assert peaks[16] <= (3 if world_size == 1 else 5) * tile_bytes, f"{peaks[16] / tile_bytes:.1f} tiles"


@on_ranks(1, 2)
def test_tiles_on_shards_train_as_tiles_in_plain_pytorch(rank: int, world_size: int) -> None:
    model = train(tiles_of(16), rank)
    plain = tiles_of(16)
    optimizer = HybridAdam(plain.parameters(), lr=1e-3)
    for step in range(3):
        loss_of(plain, step, rank).backward()
        if world_size > 1:
            average_gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(weights_of(model), weights_of(plain))


@on_ranks(1, 2)
@pytest.mark.parametrize("source", ["plain", "sharded", "built"])
@pytest.mark.parametrize("target", ["wrapped", "built"])
def test_values_of_a_layer_reach_tiles_that_are_sharded(rank: int, world_size: int, source: str, target: str) -> None:
    """Rank 0's values count, and the next step starts from them."""
    torch.manual_seed(rank)
    plain = nn.Linear(IN, OUT)
    torch.manual_seed(0)
    expected = nn.Linear(IN, OUT)
    with ZeroInitContext(enabled=target == "built"):
        with ZeroInitContext(enabled=source == "built" and target != "built"):
            torch.manual_seed(rank)
            other: Any = plain if source != "built" else nn.Linear(IN, OUT)
            if source == "sharded":
                ShardedModel(other, device="emulated")
        if target == "built":
            tiled = TiledLinear(IN, OUT, in_splits=3, out_splits=4, init_linear=other)
        else:
            tiled = TiledLinear(IN, OUT, in_splits=3, out_splits=4)
    model = ShardedModel(tiled, device="emulated", tensor_placement_policy="cpu")
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if target == "wrapped":
        tiled.copy_params_from(other)
    model(torch.zeros(2, IN)).sum().backward()  # gradients of biases are 2, of weights 0
    optimizer.step()
    with GatheredParameters(tiled), torch.no_grad():
        assert torch.equal(whole_of(tiled, "data")[0], expected.weight)
        assert torch.equal(whole_of(tiled, "data")[1], expected.bias - 1)
