"""The user's torch.set_default_device is for the user's tensors: a step makes its own where they belong."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from gemini import ShardedModel, ShardedOptimizer, state_hash
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, PLACES, adam, build, inputs, wrap

STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16, "reuse_fp16_shard": True},
}


@contextmanager
def meta_by_default() -> Iterator[None]:
    """A tensor that is made without a device has no values. On a machine with a GPU this is "cuda"."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def train(place: str, way: str, is_default: bool, rank: int, norm_type: float) -> list[Any]:
    """Two micro-batches a step, the first without synchronisation; losses, norms and weights, bit by bit."""
    model = wrap(place, **WAYS[way])
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    batches = [inputs(10 * number + rank, WAYS[way].get("dtype")) for number in range(2 * STEPS)]
    found: list[Any] = []
    with meta_by_default() if is_default else nullcontext():
        for step in range(STEPS):
            for micro in range(2):
                with model.no_sync() if micro == 0 and step != 1 else nullcontext():
                    x = batches[2 * step + micro]
                    loss = (model(x) - x.flip(-1)).square().mean()
                    optimizer.backward(loss)
                    found.append(float(loss.detach()))
            found.append(float(optimizer.clip_grad_norm_(0.05, norm_type)))
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()
        found += [value.tolist() for value in model.state_dict().values()]
        found += [state[name].tolist() for state in saved["state"].values() for name in sorted(state)]
    model.close()
    return found


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("way", WAYS)
def test_training_under_another_default_device_has_the_same_bits(rank: int, world_size: int, way: str) -> None:
    for place in PLACES:
        for norm_type in (2.0, float("inf")) if place == "cpu" else (2.0,):
            under, without = (train(place, way, is_default, rank, norm_type) for is_default in (True, False))
            assert under == without, place


def test_what_is_wrapped_and_loaded_under_another_default_device_has_the_same_bits() -> None:
    def hashed(is_default: bool) -> str:
        modules, batches = [build(), build()], [inputs(step) for step in range(STEPS)]
        with meta_by_default() if is_default else nullcontext():
            states: list[Any] = []
            for module in modules:
                model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL, tensor_placement_policy="cpu")
                optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
                if states:
                    model.load_state_dict(states[0])
                    optimizer.load_state_dict(states[1])
                for x in batches:
                    optimizer.backward((model(x) - x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                states = [model.state_dict(), optimizer.state_dict()]
            return state_hash(model, optimizer)

    assert hashed(True) == hashed(False)


def test_a_plain_model_steps_under_another_default_device() -> None:
    def weight(is_default: bool) -> list[float]:
        parameter = torch.nn.Parameter(torch.ones(300))
        parameter.grad = torch.ones(300)
        optimizer = HybridAdam([parameter], lr=0.1)
        with meta_by_default() if is_default else nullcontext():
            optimizer.step()
        found: list[float] = parameter.tolist()
        return found

    assert weight(True) == weight(False)
