"""Reading and setting whole parameters at moments when something else of them is under way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import (
    DivergenceError,
    GatheredParameters,
    ShardedModel,
    ShardedOptimizer,
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import mlp
from tests.zoo.mlp import WIDTH, build

CUDA: dict[str, Any] = {"stage": 3, "tensor_placement_policy": "cuda"}
CPU: dict[str, Any] = {"stage": 3, "tensor_placement_policy": "cpu"}
REPLICATED: list[dict[str, Any]] = [
    {"stage": 1, "tensor_placement_policy": "cpu"},
    {"stage": 2, "tensor_placement_policy": "cuda"},
]
SMALLEST: dict[str, Any] = {"model_data_memory": "smallest"}
everywhere = on_ranks_with("wrap", {1: [CUDA, CPU, SMALLEST], 2: [CUDA, CPU, *REPLICATED, SMALLEST]})
half_precision = on_ranks_with("wrap", {1: [CUDA, CPU], 2: [CUDA, CPU, *REPLICATED]})


def _wrap(wrap: dict[str, Any], module: nn.Module | None = None) -> ShardedModel:
    """A model whose layers are one chunk each."""
    return ShardedModel(build() if module is None else module, **mlp.placed(**wrap))


def _values(model: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator).bfloat16().float() for parameter in model.parameters()]


def _load(model: nn.Module, values: list[Tensor]) -> None:
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))


def _set_whole(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        safe_set_full_fp32_param(parameter, value)


def _set_local(model: nn.Module, values: list[Tensor]) -> None:
    """Each rank takes a half of its part, and the other half is as it is."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        old = safe_get_local_fp32_param(parameter)
        safe_set_full_fp32_param(parameter, value)
        new = safe_get_local_fp32_param(parameter)
        safe_set_local_fp32_param(parameter, old)
        safe_set_local_fp32_param(parameter, new)


SETTERS = [_load, _set_whole, _set_local]


@pytest.mark.sampled(4)
@everywhere
def test_what_is_set_after_an_evaluation_is_used(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Payloads that the evaluation left in slots, or on their way into one, do not bring old weights back."""
    model = _wrap(wrap)
    plain = build()
    x = mlp.inputs(0)
    for _ in range(2):  # from then on fetches follow a record
        model(x).square().mean().backward()
    for seed, set_all in enumerate([*SETTERS, *SETTERS]):
        with torch.set_grad_enabled(seed >= len(SETTERS)):
            assert torch.equal(model(x), plain(x))
        values = _values(plain, seed)
        set_all(model, values)
        with torch.no_grad():
            for parameter, value in zip(plain.parameters(), values, strict=True):
                parameter.copy_(value)
    assert torch.equal(model(x), plain(x))
    model.close()


@pytest.mark.sampled(4)
@everywhere
def test_a_graph_from_before_values_were_set_is_refused(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """The graph is from before the values, so its gradients would be of neither: torch refuses it, and so do we."""
    model = _wrap(wrap)
    ShardedOptimizer(model, mlp.adam(model.parameters()))
    for seed, set_all in enumerate(SETTERS):
        loss = model(mlp.inputs(0)).square().mean()
        set_all(model, _values(model, seed))
        with pytest.raises(RuntimeError, match=r"before the last|modified by an inplace operation"):
            loss.backward()
        model(mlp.inputs(0)).square().mean().backward()
    model.close()


@pytest.mark.sampled(2)
@half_precision
def test_what_is_set_between_two_edits_keeps_its_fractions(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """What was set between two edits of a bf16 weight keeps the bits that bf16 has no room for."""
    model = _wrap({"dtype": torch.bfloat16, **wrap})
    ShardedOptimizer(model, mlp.adam(model.parameters()))
    weight = model.layers[1].weight
    fine = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
    for row in (0, 1):
        with GatheredParameters(weight, modifier_rank=0):
            weight.data[row] += 1
        if row == 0:
            safe_set_full_fp32_param(weight, fine)
    after = safe_get_full_fp32_param(weight)
    assert torch.equal(after[2:], fine[2:]) and torch.equal(after[0], fine[0])
    assert torch.equal(after[1], (fine[1].bfloat16() + 1).float())
    model.close()


@pytest.mark.sampled(2)
@half_precision
def test_a_frozen_bf16_parameter_is_read_in_fp32(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A frozen bf16 parameter has no master, and is fp32 whichever way it is read."""
    module = build()
    for parameter in module.layers[0].parameters():
        parameter.requires_grad_(False)
    model = _wrap({"dtype": torch.bfloat16, **wrap}, module)
    weight = model.layers[0].weight
    whole, local = safe_get_full_fp32_param(weight), safe_get_local_fp32_param(weight)
    assert whole.dtype is local.dtype is torch.float32
    assert set(local.tolist()) <= set(whole.flatten().tolist())
    model.close()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_load_different_keys_are_told(rank: int, world_size: int, stage: int) -> None:
    """Ranks that load different keys are told, before any weight has changed."""
    model = _wrap({"stage": stage})
    before = model.state_dict()
    state = {name: value + 1 for name, value in before.items()}
    if rank == 1:
        del state["layers.0.bias"]
    with pytest.raises(DivergenceError, match="All ranks must load the same keys"):
        model.load_state_dict(state, strict=False)
    mlp.assert_same(model.state_dict(), before)
    model.close()
