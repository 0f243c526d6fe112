"""What users copy from the pages of DeepSpeed, Colossal-AI, OneFlow and others, with imports changed, on two ranks."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import ConfigError, ShardedModel, ShardedOptimizer, deepspeed, state_hash
from gemini.deepspeed.ops.adam import DeepSpeedCPUAdam
from gemini.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import WIDTH, build

ADAMW = {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
# the examples of a page leave out what is not their subject, so each gets an optimizer and a place to run
ZERO: dict[str, dict[str, Any]] = {
    "stage 3, fp16": {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
    "optimizer on the host": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "all on the host": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    },
}
BY_HAND: dict[str, dict[str, Any]] = {
    "stage 3, fp16": {"stage": 3, "dtype": torch.float16},
    "optimizer on the host": {"stage": 3, "tensor_placement_policy": "cpu"},
    "all on the host": {"stage": 3, "tensor_placement_policy": "cpu"},
}


def batch(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


@on_ranks(2)
@pytest.mark.parametrize("name", ZERO)
def test_a_zero_config_of_deepspeeds_page_trains_as_the_same_settings_by_hand(
    rank: int, world_size: int, name: str
) -> None:
    engine, _, _, _ = deepspeed.initialize(model=build(), config={**ZERO[name], "optimizer": ADAMW})
    model = ShardedModel(build(), device="emulated", **BY_HAND[name])
    its = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=0.001, betas=(0.8, 0.999), weight_decay=3e-7))
    dtype = BY_HAND[name].get("dtype", torch.float32)
    for step in range(3):
        loss = loss_of(engine(batch(rank, step, dtype)))
        engine.backward(loss)
        engine.step()
        other = loss_of(model(batch(rank, step, dtype)))
        its.backward(other)
        its.step()
        assert torch.equal(loss, other)
    assert state_hash(engine.model) == state_hash(model)
    engine.empty_partition_cache()


@on_ranks(2)
@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme_data"}}, "disk tier"),
        ({"offload_param": {"device": "nvme", "nvme_path": "/nvme_data"}}, "disk tier"),
        ({"mics_shard_size": 8, "mics_hierarchical_params_gather": False}, "mics_shard_size"),
    ],
    ids=["optimizer on nvme", "parameters on nvme", "mics"],
)
def test_what_a_page_shows_and_is_not_here_is_refused(
    rank: int, world_size: int, section: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        deepspeed.initialize(model=build(), config={"zero_optimization": {"stage": 3, **section}, "optimizer": ADAMW})


def test_a_config_without_a_comma_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n"zero_optimization": {\n"stage": 3,\n"offload_optimizer": {"device": "cpu"}\n"offload_param": {}\n}\n}'
    )
    with pytest.raises(ConfigError, match=r"line 4.*comma"):
        deepspeed.initialize(model=build(), config=str(path))


@on_ranks(2)
def test_deepspeeds_snippets_on_parameters_run(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with deepspeed.zero.GatheredParameters(module[0].weight, modifier_rank=0), torch.no_grad():
        if rank == 0:
            module[0].weight.zero_()
    config = {"zero_optimization": {"stage": 3}}
    optimizer = DeepSpeedCPUAdam(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.backward(loss_of(engine(batch(rank, 0, torch.float32))))
    for _, parameter in engine.module.named_parameters():
        assert safe_get_full_grad(parameter).shape == parameter.shape
    engine.step()
    for _, parameter in engine.module.named_parameters():
        assert safe_get_full_fp32_param(parameter).shape == parameter.shape
        assert safe_get_full_optimizer_state(parameter, "exp_avg").shape == parameter.shape
        assert safe_get_local_fp32_param(parameter).dim() == 1
        safe_set_full_fp32_param(parameter, torch.zeros(parameter.shape))
        safe_set_full_optimizer_state(parameter, torch.zeros(parameter.shape), "exp_avg")
    with torch.no_grad():
        assert not engine(batch(rank, 1, torch.float32)).any()


COLOSSAL = """
from gemini import TensorShardStrategy

BATCH_SIZE = 4
zero = dict(
    model_config=dict(
        shard_strategy=TensorShardStrategy(),
        tensor_placement_policy="auto",
        reuse_fp16_shard=False,
    ),
    optimizer_config=dict(initial_scale=2**5, gpu_margin_mem_ratio=0.0),
)
gradient_accumulation = 2
clip_grad_norm = 1.0
"""


@on_ranks(2)
def test_a_python_config_of_colossalais_page_trains_as_the_same_settings_by_hand(rank: int, world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.py"
        path.write_text(COLOSSAL)
        module = build()
        optimizer = HybridAdam(module.parameters(), lr=1e-3)
        engine, *_ = gemini.initialize(module, optimizer, nn.MSELoss(), config=path, verbose=False)
    assert engine.config.constants["BATCH_SIZE"] == 4
    engine.train()
    model = ShardedModel(build(), "tensor", device="emulated", tensor_placement_policy="cpu", dtype=torch.float16)
    its = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3), initial_scale=2**5, clip_grad_norm=1.0)
    for step in range(4):
        data = batch(rank, step, torch.float32)  # the model casts it to fp16, as Colossal-AI's does
        engine.zero_grad()
        loss = engine.criterion(engine(data), data)
        engine.backward(loss)
        engine.step()
        other = nn.MSELoss()(model(data.half()), data)
        its.backward(other / 2)
        assert torch.equal(loss, other)
        if step % 2:
            its.step()
    assert engine.global_steps == 2
    assert state_hash(engine.model) == state_hash(model)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_oneflows_training_trains_at_every_stage(rank: int, world_size: int, stage: int) -> None:
    """Its model, loss and optimizer, with `enable_zero(True, stage=...)` as the stage of the config."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    engine, *_ = gemini.initialize(module, optimizer, nn.CrossEntropyLoss(), config={"stage": stage}, verbose=False)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 10))
    its = torch.optim.SGD(plain.parameters(), lr=1e-3)
    x, y = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)), torch.ones(128, dtype=torch.int64)
    for _ in range(3):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        its.zero_grad()
        nn.CrossEntropyLoss()(plain(x), y).backward()
        its.step()
    for name, value in engine.model.state_dict().items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), rtol=0, atol=1e-6)
