"""Reaching into a sharded model, on one rank or several, beside a plain model into which the same is reached."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import GatheredParameters, GeminiError, ShardedModel, ShardedOptimizer, UnsupportedError
from optim import to_bfloat16_half_up
from tests import mlp
from tests.mlp import assert_same, build, weights_of

CHUNK_NUMEL = 512
WRAPS: list[dict[str, Any]] = [
    {"stage": stage, **place}
    for stage in (0, 1, 2, 3)
    for place in ({"tensor_placement_policy": "cuda"}, {"tensor_placement_policy": "cpu"})
]
WRAPS += [{"shard_strategy": "tensor"}, {"model_data_memory": "smallest"}]


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a scalar, a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.second.weight = nn.Parameter(self.second.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale)


def value_like(tensor: Tensor, seed: int) -> Tensor:
    """bf16 numbers, so that they are exact in every dtype."""
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().to(torch.float32).abs()


class Pair:
    """A sharded model and its plain reference; every rank sees the same data."""

    def __init__(self, world_size: int, wrap: dict[str, Any]) -> None:
        wrap = {"chunk_size": CHUNK_NUMEL, **wrap}
        if wrap.get("model_data_memory") == "smallest":
            del wrap["model_data_memory"]
            wrap["model_data_memory"] = mlp.smallest_budget(Odd, **wrap)
        self.world_size = world_size
        self.dtype = wrap.get("dtype", torch.float32)
        self.model = ShardedModel(build(Odd), device="emulated", **wrap)
        self.optimizer = ShardedOptimizer(self.model, mlp.adam(self.model.parameters()))
        self.plain = build(Odd).to(self.dtype)
        self.its = mlp.adam(self.plain.parameters())

    def backward(self, step: int) -> None:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(self.dtype)
        loss, wanted = self.model(x).square().mean(), self.plain(x).square().mean()
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        for parameter in self.plain.parameters():
            total = own = parameter.grad
            if self.dtype is torch.float32:  # the mean of equal 16-bit gradients is made in fp32, exactly
                for _ in range(self.world_size - 1):
                    total = total + own
                parameter.grad = total / self.world_size

    def step(self) -> None:
        self.optimizer.step()
        self.its.step()
        self.its.zero_grad()
        assert_same(weights_of(self.model), weights_of(self.plain))

    def both(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.model.parameters(), self.plain.parameters(), strict=True))


def reads(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    pair = Pair(world_size, wrap)
    for step in range(2):
        for parameter, _ in pair.both():
            assert gemini.safe_get_full_grad(parameter) is None
            assert gemini.safe_get_local_grad(parameter) is None
        pair.backward(step)
        for parameter, wanted in pair.both():
            assert torch.equal(gemini.safe_get_full_grad(parameter), wanted.grad)
        pair.step()
        for parameter, wanted in pair.both():
            assert torch.equal(gemini.safe_get_full_fp32_param(parameter), wanted)
            for key in ("exp_avg", "exp_avg_sq"):
                whole = gemini.safe_get_full_optimizer_state(parameter, key)
                assert torch.equal(whole, pair.its.state[wanted][key])
                local = gemini.safe_get_local_optimizer_state(parameter, key)
                assert local.numel() == gemini.safe_get_local_fp32_param(parameter).numel() <= parameter.numel()
                assert set(local.tolist()) <= set(whole.flatten().tolist())
    pair.model.close()


def sets(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Rank 0's values count; the others give nonsense."""
    pair = Pair(world_size, wrap)
    pair.backward(0)
    pair.step()
    for seed, (parameter, wanted) in enumerate(pair.both()):
        value = value_like(wanted, seed)
        gemini.safe_set_full_fp32_param(parameter, value if rank == 0 else torch.zeros_like(value))
        gemini.safe_set_full_optimizer_state(parameter, value * (rank == 0), "exp_avg_sq")
        with torch.no_grad():
            wanted.copy_(value)
        pair.its.state[wanted]["exp_avg_sq"].copy_(value)
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    pair.backward(1)
    pair.optimizer.clip_grad_norm_(1e9)
    for seed, (parameter, wanted) in enumerate(pair.both()):
        value = value_like(wanted, 100 + seed)
        gemini.safe_set_full_grad(parameter, value * (rank == 0))
        wanted.grad = value
        assert torch.equal(gemini.safe_get_full_grad(parameter), value)
    pair.step()
    for parameter, wanted in pair.both():  # each rank its own part, all of them the whole
        for key in ("exp_avg", "exp_avg_sq"):
            part = gemini.safe_get_local_optimizer_state(parameter, key)
            gemini.safe_set_local_optimizer_state(parameter, part * 2, key)
            pair.its.state[wanted][key] *= 2
        gemini.safe_set_local_fp32_param(parameter, gemini.safe_get_local_fp32_param(parameter) * 4)
        with torch.no_grad():
            wanted *= 4
    pair.backward(2)
    for parameter, wanted in pair.both():
        gemini.safe_set_local_grad(parameter, gemini.safe_get_local_grad(parameter) * 8)
        wanted.grad *= 8
    pair.step()
    pair.model.close()


def gathers(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    pair = Pair(world_size, wrap)
    pair.backward(0)
    pair.step()
    modifier = world_size - 1
    for seed, (parameter, wanted) in enumerate(pair.both()):
        value = value_like(wanted, seed)
        with GatheredParameters(parameter, modifier_rank=modifier):
            assert type(parameter) is nn.Parameter
            assert torch.equal(parameter, wanted)
            with GatheredParameters([parameter]):  # nested, and only to look at
                assert parameter.shape == wanted.shape
            if rank == modifier:
                parameter.data.copy_(value) if seed % 2 else parameter.detach().copy_(value)
        with torch.no_grad():
            wanted.copy_(value)
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    for step in (1, 2):  # it reached the masters, and stays
        pair.backward(step)
        pair.step()
    weight = pair.model.first.weight
    with pytest.raises(UnsupportedError, match=r"without modifier_rank= was left with changes to 'first\.weight'"):
        with GatheredParameters([weight, torch.nn.Parameter(torch.zeros(2))]):
            weight.data[0, 0] = 9.0
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    with pytest.raises(ZeroDivisionError):
        _fails_half_way(weight)
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    pair.backward(3)
    with GatheredParameters(weight), pytest.raises(GeminiError, match=r"step\(\) inside GatheredParameters"):
        pair.optimizer.step()
    with GatheredParameters(weight, modifier_rank=0, enabled=False):
        assert type(weight) is not nn.Parameter
    for bad in (-1, world_size, True, "0"):
        with pytest.raises(ValueError, match=f"one of the {world_size} ranks"):
            GatheredParameters(weight, modifier_rank=bad)  # type: ignore[arg-type]
    pair.model.close()


def _fails_half_way(weight: nn.Parameter) -> None:
    with GatheredParameters(weight, modifier_rank=0):
        weight.data.zero_()
        raise ZeroDivisionError


def masters(rank: int, world_size: int) -> None:
    """bf16: what is set reaches master and parameter, each in its own precision."""
    model = ShardedModel(build(Odd), device="emulated", dtype=torch.bfloat16, chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    weight = model.second.weight
    fine = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    gemini.safe_set_full_fp32_param(weight, fine)
    assert torch.equal(gemini.safe_get_full_fp32_param(weight), fine)
    assert torch.equal(model.state_dict()["second.weight"], gemini.safe_get_full_fp32_param(weight).bfloat16())
    with GatheredParameters(weight, modifier_rank=0):
        if rank == 0:
            weight.data[0] += 1
    after = gemini.safe_get_full_fp32_param(weight)
    assert torch.equal(after[1:], fine[1:]), "masters of what was not changed keep their bits"
    assert not torch.equal(after[0], fine[0])
    number = [p is weight for p in model.parameters()].index(True)
    assert torch.equal(optimizer.state_dict()["masters"][number], after)
    model.close()


def edits_survive(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Through GatheredParameters and safe_set_full_fp32_param, to the next forward, the master and the next steps."""
    pair = Pair(world_size, wrap)
    pair.backward(0)
    pair.step()
    for seed, (parameter, wanted) in enumerate(pair.both()):
        value = value_like(wanted, seed)
        with GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(value if rank == 0 else torch.zeros_like(value))
        with torch.no_grad():
            wanted.copy_(value)
        assert torch.equal(gemini.safe_get_full_fp32_param(parameter), value)
    for step in (1, 2):
        pair.backward(step)
        pair.step()
    for seed, (parameter, wanted) in enumerate(pair.both()):
        fine = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed))
        gemini.safe_set_full_fp32_param(parameter, fine if rank == 0 else torch.zeros_like(fine))
        with torch.no_grad():
            rounded = to_bfloat16_half_up(fine.reshape(-1)).view(fine.shape) if "dtype" in wrap else fine
            wanted.copy_(rounded)
            if "dtype" in wrap:
                pair.its.state[wanted]["master"].copy_(fine)
    for step in (3, 4):
        pair.backward(step)
        pair.step()
    for parameter, wanted in pair.both():
        master = pair.its.state[wanted]["master"] if "dtype" in wrap else wanted
        assert torch.equal(gemini.safe_get_full_fp32_param(parameter), master)
    pair.model.close()


HALF: list[dict[str, Any]] = [
    {"stage": stage, "dtype": torch.bfloat16, "tensor_placement_policy": policy}
    for stage, policy in ((0, "cpu"), (1, "cuda"), (2, "cpu"), (3, "cuda"), (3, "cpu"))
]


def frozen(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A frozen parameter has no gradient and no state to read, whether it was trained before or never."""
    pair = Pair(world_size, wrap)
    pair.backward(0)
    pair.step()
    for trains in (False, True):
        for parameter in pair.model.parameters():
            parameter.requires_grad_(trains)
        for parameter in pair.model.parameters():
            assert gemini.safe_get_full_grad(parameter) is None
            assert gemini.safe_get_local_grad(parameter) is None
            for key in ("exp_avg", "exp_avg_sq"):
                assert (gemini.safe_get_full_optimizer_state(parameter, key) is not None) == trains
                assert (gemini.safe_get_local_optimizer_state(parameter, key) is not None) == trains
    pair.model.close()


CASES = [reads, sets, gathers, frozen]
