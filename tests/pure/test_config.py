"""A config of gemini's own: what is read, what it becomes, and where ranks compare it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import CPUAdam, HybridAdam, Settings, TensorShardStrategy
from gemini.engine.config import Config, load_config
from gemini.engine.config.config import BatchSizes, batch_sizes
from gemini.engine.config.read import nearest
from gemini.engine.config.tables import with_tables
from gemini.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
SAME = {
    ".json": '{"stage": 2, "dtype": "bf16", "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}',
    ".yaml": "stage: 2\ndtype: bf16\noptimizer:\n  type: AdamW\n  params: {lr: 1e-3}\n",
    ".toml": 'stage = 2\ndtype = "bf16"\n[optimizer]\ntype = "AdamW"\nparams = {lr = 1e-3}\n',
    ".py": "import torch\nstage = 2\ndtype = torch.bfloat16\noptimizer = dict(type='AdamW', params=dict(lr=1e-3))\n",
}


def written(folder: Path, suffix: str, text: str) -> Path:
    path = folder / f"config{suffix}"
    path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", SAME)
def test_one_config_can_be_written_in_four_formats(suffix: str, tmp_path: Path) -> None:
    config = load_config(written(tmp_path, suffix, SAME[suffix]))
    assert config.settings() == Settings(stage=2, dtype=torch.bfloat16)
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-3}
    given = {"stage": 2, "dtype": "bfloat16", "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    assert config.canonical() == load_config(given).canonical()


def test_without_a_config_all_is_as_without_arguments() -> None:
    config = load_config()
    assert config.settings() == load_config({}).settings() == Settings()
    assert config.ignored == ()
    assert config.batch_sizes(4) == BatchSizes(None, None, 1)
    assert load_config(config) is config


def test_every_argument_of_a_sharded_model_is_a_field() -> None:
    assert {each.name for each in dataclasses.fields(Settings)} <= set(Config.model_fields)


def test_values_have_the_names_that_a_file_can_hold() -> None:
    config = load_config(
        {
            "shard_strategy": "tensor",
            "dtype": {"torch.nn.LayerNorm": "fp32", "head.*": None, "*": "torch.bfloat16"},
            "reduce_dtype": "float32",
            "chunk_size": 1e6,
            "device_memory": "2GB",
        }
    )
    settings = config.settings()
    assert settings.dtype == {torch.nn.LayerNorm: torch.float32, "head.*": None, "*": torch.bfloat16}
    assert (settings.reduce_dtype, settings.chunk_size, settings.device_memory) == (torch.float32, 10**6, 2 * 10**9)
    in_python = load_config({"shard_strategy": TensorShardStrategy(), "device_memory": 2 * 10**9})
    assert in_python.settings().device_memory == settings.device_memory


@pytest.mark.parametrize(
    ("name", "kind"), [("HybridAdam", HybridAdam), ("cpuadam", CPUAdam), ("SGD", torch.optim.SGD)], ids=str
)
def test_an_optimizer_is_made_from_its_name_and_arguments(name: str, kind: type[torch.optim.Optimizer]) -> None:
    config = load_config({"optimizer": {"type": name, "params": {"lr": 0.25}}})
    assert config.optimizer is not None
    made = config.optimizer.make([torch.nn.Parameter(torch.ones(2))])
    assert type(made) is kind
    assert made.param_groups[0]["lr"] == 0.25


def test_scaling_and_clipping_are_arguments_of_the_sharded_optimizer() -> None:
    options = load_config({"loss_scale": {"initial_scale": 32}, "clip_grad_norm": 2}).optimizer_options()
    assert options["initial_scale"] == 32
    assert options["clip_grad_norm"] == 2
    assert options["growth_interval"] == 1000


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "world_size", "expected"),
    [
        (64, 4, None, 4, (64, 4, 4)),
        (64, None, 4, 4, (64, 4, 4)),
        (None, 4, 4, 4, (64, 4, 4)),
        (64, 4, 4, 4, (64, 4, 4)),
        (64, None, None, 4, (64, 16, 1)),
        (None, 4, None, 4, (16, 4, 1)),
        (None, None, 3, 4, (None, None, 3)),
    ],
)
def test_two_batch_sizes_give_the_third(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int, expected: tuple[int | None, ...]
) -> None:
    found = batch_sizes(train, micro, accumulation, world_size)
    assert dataclasses.astuple(found) == expected


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        ({"device": "cpu"}, True),
        ({"rank_timeout": 5.0}, True),
        ({"shard_strategy": "chunk"}, True),
        ({"shard_strategy": "tensor"}, False),
        ({"dtype": "fp16"}, False),
        ({"clip_grad_norm": 1.0}, False),
        ({"optimizer": {"type": "SGD"}}, False),
        ({"gradient_accumulation_steps": 2}, False),
    ],
    ids=str,
)
def test_ranks_can_compare_what_they_must_have_in_common(change: dict[str, Any], is_equal: bool) -> None:
    assert (load_config(change).canonical() == load_config({}).canonical()) == is_equal


@pytest.mark.parametrize(
    ("written_as", "meant"),
    [
        ("gradient_clipping", "clip_grad_norm"),
        ("max_grad_norm", "clip_grad_norm"),
        ("gradient_clip_val", "clip_grad_norm"),
        ("accumulate_grad_batches", "gradient_accumulation_steps"),
        ("gradient_accumulation", "gradient_accumulation_steps"),
        ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
        ("max_gpu_memory", "device_memory"),
        ("cpu_memory", "host_memory"),
        ("cpu_offload", "tensor_placement_policy"),
        ("placement_policy", "tensor_placement_policy"),
        ("mixed_precision", "dtype"),
        ("torch_dtype", "dtype"),
        ("zero_stage", "stage"),
        ("lr_scheduler", "scheduler"),
        ("communication_data_type", "reduce_dtype"),
        ("bucket_size", "chunk_size"),
        ("timeout", "rank_timeout"),
        ("stge", "stage"),
        ("tensor_placment_policy", "tensor_placement_policy"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_means_the_same(written_as: str, meant: str) -> None:
    assert nearest(written_as, Config.model_fields) == meant
    with pytest.raises(ConfigError, match=f"{written_as} is not a key; the nearest valid one is '{meant}"):
        load_config({written_as: 1, "stage": 2, "device": None}, dialect="gemini")


def test_capitals_of_a_python_config_are_the_scripts_own(tmp_path: Path) -> None:
    text = "import math\nfrom pathlib import Path\nBATCH_SIZE = 8\n_HALF = 4\ndef f(): return 1\nstage = f()\n"
    config = load_config(written(tmp_path, ".py", text))
    assert dict(config.constants) == {"BATCH_SIZE": 8}
    assert config.stage == 1


def test_json_may_have_comments_last_commas_and_pythons_constants(tmp_path: Path) -> None:
    text = '{ // one\n# two\n"stage": 2, /* three\n*/ "reuse_fp16_shard": True, "device": None,\n"drop_last": false,}'
    config = load_config(written(tmp_path, ".json", text))
    assert (config.stage, config.reuse_fp16_shard, config.device, config.drop_last) == (2, True, None, False)
    inside = load_config(
        written(tmp_path, ".json", '{"device": "emulated", "monitors": {"json_lines": {"job_name": "a // True,}"}}}')
    )
    assert inside.monitors.json_lines is not None
    assert inside.monitors.json_lines.job_name == "a // True,}", "strings stay as they are"


def test_the_tables_of_the_documentation_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert page.count("<!-- table ") == 4
    assert with_tables(page) == page, "run: python -m gemini.engine.config.tables docs/config.md"
