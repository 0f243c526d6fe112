"""`ds_id` and its like on parameters, by which scripts for DeepSpeed's stage 3 know what to gather."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from gemini import deepspeed
from gemini.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.harness.on_ranks import gathered, on_ranks


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def config(device: str) -> dict[str, Any]:
    zero = {"stage": 3, "offload_param": {"device": device}, "offload_optimizer": {"device": device}}
    adam = {"type": "Adam", "params": {"lr": 1e-2}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "zero_optimization": zero}


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """`save_zero_three_model` of DeepSpeed-Chat, without its file."""
    state = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            to_fetch = [parameter] if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE else []
            with deepspeed.zero.GatheredParameters(to_fetch, enabled=True):
                state[name] = parameter.data.cpu()
        else:
            state[name] = parameter.cpu()
    return state


@on_ranks(1, 2)
@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("is_built", [False, True])
def test_a_stage_3_save_of_the_scripts_own_writes_whole_weights(
    rank: int, world_size: int, device: str, is_built: bool
) -> None:
    with deepspeed.zero.Init(enabled=is_built):
        model = build()
    assert all(hasattr(each, "ds_id") for each in model.parameters()) is is_built
    engine, *_ = deepspeed.initialize(model=model, config=config(device))
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    expected = engine.module_state_dict()
    file = io.BytesIO()
    torch.save(whole_weights(engine.module), file)
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value) for name, value in expected.items())


@on_ranks(1, 2)
def test_a_parameter_says_where_its_values_are(rank: int, world_size: int) -> None:
    engine, *_ = deepspeed.initialize(model=build(), config=config("cpu"))
    weight, bias = engine.module[0].weight, engine.module[0].bias
    assert (weight.ds_shape, weight.ds_numel, bias.ds_numel) == (torch.Size([8, 8]), 64, 8)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters([weight]):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert weight.ds_numel == weight.numel()
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    ids = [each.ds_id for each in engine.module.parameters()]
    assert len({*ids}) == len(ids)
    others: list[list[int]] = gathered([each - ids[0] for each in ids])
    assert all(each == others[0] for each in others)
    assert not hasattr(weight, "ds_tensor")
    with pytest.raises(AttributeError, match=r"'0.weight' has no 'ds_tensor': .*safe_get_local_fp32_param"):
        _ = weight.ds_tensor
    assert not hasattr(copy.deepcopy(engine.module)[0].weight, "ds_id")
