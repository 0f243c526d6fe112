"""Colossal-AI's config file: its template with other imports, and what each key becomes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import Settings, TensorShardStrategy
from gemini.engine.config import load_config
from gemini.engine.config.colossal_keys import AMP_TYPE
from gemini.errors import ConfigError

TEMPLATE = Path(__file__).resolve().parents[1] / "configs" / "colossal.py"


def test_the_template_is_read_with_other_imports_only() -> None:
    config = load_config(TEMPLATE)
    settings = config.settings()
    assert isinstance(settings.shard_strategy, TensorShardStrategy)
    assert (settings.stage, settings.dtype, settings.tensor_placement_policy) == (3, torch.float16, "cuda")
    assert settings.reuse_fp16_shard
    options = config.optimizer_options()
    assert (options["initial_scale"], options["max_scale"], options["clip_grad_norm"]) == (32.0, 2.0**32, 1.0)
    assert config.batch_sizes(1).accumulation == 4
    assert dict(config.constants) == {"BATCH_SIZE": 16, "NUM_EPOCHS": 2}
    assert [key.rpartition(".")[2] for key, _ in config.ignored] == [
        "reduce_scatter_bucket_size_mb",
        "gradient_predivide_factor",
        "gpu_margin_mem_ratio",  # the template's policy is "cuda"
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"zero": {"model_config": {"bf16": True}}}, {"stage": 3, "dtype": torch.bfloat16}),
        (
            {"zero": {"model_config": {"fp32_reduce_scatter": True}}},
            {"dtype": torch.float16, "reduce_dtype": torch.float32},
        ),
        ({"zero": {}}, {"dtype": torch.float16}),
        (
            {"zero": {"model_config": {"placement_policy": "static", "offload_optim_frac": 0.5}}},
            {"dtype": torch.float16, "tensor_placement_policy": "static", "offload_optim_frac": 0.5},
        ),
        (
            {"zero": {"optimizer_config": {"gpu_margin_mem_ratio": 0.8}}},
            {"dtype": torch.float16, "gpu_margin_mem_ratio": 0.8},
        ),
        (
            {"plugin": {"shard_param_frac": 0.5, "offload_optim_frac": 1, "offload_param_frac": 0.25}},
            {
                "dtype": torch.float16,
                "tensor_placement_policy": "static",
                "shard_param_frac": 0.5,
                "offload_optim_frac": 1.0,
                "offload_param_frac": 0.25,
            },
        ),
        (
            {"plugin": {"placement_policy": "auto", "gpu_margin_mem_ratio": 0.0, "precision": "bf16", "tp_size": 1}},
            {"dtype": torch.bfloat16, "gpu_margin_mem_ratio": 0.0},
        ),
        *(
            (
                {"zero": {"model_config": {"tensor_placement_policy": policy}}},
                {"dtype": torch.float16, "tensor_placement_policy": policy},
            )
            for policy in ("auto", "cpu", "cuda")
        ),
        (
            {"plugin": {"placement_policy": "auto", "max_prefetch": 4}},
            {"dtype": torch.float16, "max_prefetch": 4},
        ),
        ({"gradient_accumulation": 2}, {"stage": 0, "gradient_accumulation_steps": 2}),
        ({"fp16": {"mode": AMP_TYPE.NAIVE}, "clip_grad_norm": 1.0}, {"stage": 0, "dtype": torch.float16}),
        ({"fp16": {"mode": "torch", "init_scale": 32.0}}, {"stage": 0, "dtype": torch.float16}),
        ({"fp16": {"mode": None}, "gradient_accumulation": 2}, {"stage": 0, "gradient_accumulation_steps": 2}),
        ({"zero": {}, "parallel": {"pipeline": 1, "tensor": {"size": 1, "mode": None}}}, {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_what_a_config_becomes(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert load_config(given).settings() == Settings(**expected)


def test_scaler_keys_of_mixed_precision_are_those_of_the_loss_scale() -> None:
    given = {"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 32.0, "growth_interval": 5}}
    options = load_config(given).optimizer_options()
    assert (options["initial_scale"], options["growth_interval"]) == (32.0, 5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"zero": {"model_config": {"offload_optim_frac": 0.5}}}, "offload_optim_frac=0.5 belongs to"),
        ({"plugin": {"offload_optim_frac": 1.5}}, r"offload_optim_frac must be a number from 0 to 1, found 1\.5"),
        ({"plugin": {"gpu_margin_mem_ratio": 7, "placement_policy": "auto"}}, "gpu_margin_mem_ratio must be a number"),
        ({"plugin": {"tp_size": 2}}, "data-parallel ranks only"),
        ({"plugin": {}, "zero": {}}, "plugin and zero are both there"),
        ({"plugin": {"precision": "fp8"}}, "plugin.precision"),
        ({"plugin": {"placement_policy": "gpu"}}, "plugin.placement_policy: tensor_placement_policy='gpu' is unknown"),
    ],
    ids=str,
)
def test_what_contradicts_itself_or_is_not_there_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(given)
