"""Configs that are wrong: each is refused in one sentence that names the place, what was found and what to do."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini.engine.config import load_config
from gemini.engine.config.load import TABLES, Dialect
from gemini.errors import ConfigError

ZERO, OFFLOAD = "zero_optimization", "offload_optimizer"


def zero(**keys: Any) -> dict[str, Any]:
    return {ZERO: {"stage": 3, **keys}}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


# what is given, and what the error says; a mapping, or the end of a file's name and its text
BAD: list[tuple[dict[str, Any] | tuple[str, str], str]] = [
    # wrong values and types
    ({"stage": 4}, "stage must be 0, 1, 2 or 3, found 4"),
    ({"stage": "3"}, "stage must be 0, 1, 2 or 3, found '3'"),
    ({"stage": True}, "stage must be 0, 1, 2 or 3, found True"),
    ({"dtype": "fp8"}, "dtype: 'fp8' is no dtype; write one of fp32, fp16, bf16, fp64"),
    ({"dtype": {"torch.nn.LayerNrm": "fp32"}}, "torch.nn.LayerNrm is no class; the nearest is torch.nn.LayerNorm"),
    ({"reduce_dtype": "fp64"}, "reduce_dtype must be None or one of torch.float32"),
    ({"shard_strategy": "rows"}, "shard_strategy='rows' is unknown; valid names are 'tensor', 'bucket', 'chunk'"),
    ({"tensor_placement_policy": "gpu"}, "tensor_placement_policy='gpu' is unknown: choose one of"),
    ({"chunk_size": 0}, "chunk_size must be at least 1 element, found 0"),
    ({"chunk_size": 0.5}, "chunk_size must be an int (elements) or None, found float"),
    ({"rank_timeout": -1}, "rank_timeout must be a number of seconds above 0, found -1"),
    ({"reuse_fp16_shard": "yes"}, "reuse_fp16_shard must be True or False, found 'yes'"),
    ({"drop_last": 1}, "drop_last must be true or false, found 1"),
    ({"clip_grad_norm": 0}, "clip_grad_norm must be above 0, found 0"),
    ({"clip_grad_norm": "1.0"}, "clip_grad_norm must be a number, found '1.0'"),
    ({"clip_grad_norm": float("inf")}, "clip_grad_norm must be a finite number, found inf"),
    ({"loss_scale": 65536}, "loss_scale must be a mapping of keys to values, found 65536"),
    ({"loss_scale": {"growth_interval": 2.5}}, "loss_scale.growth_interval must be a whole number, found 2.5"),
    ({"loss_scale": {"hysteresis": 0}}, "loss_scale.hysteresis must be an integer of at least 1, found 0"),
    ({"monitors": {"tensorboard": True}}, "monitors.tensorboard must be a mapping of keys to values, found True"),
    # units
    (
        {"device_memory": 8.0},
        "device_memory=8.0 is a fraction of a byte, or of what it does not say: write a size with",
    ),
    ({ZERO: {}, "device_memory": 8.5}, "device_memory=8.5 is a fraction of a byte"),
    ({"device_memory": "8 gigs"}, "device_memory='8 gigs' is not a size: write a number and one of B, KB, MB, GB, TB"),
    ({"host_memory": "lots"}, "host_memory='lots' is not a size"),
    ({"model_data_memory": -1}, "model_data_memory must be a finite number of bytes >= 0, found -1"),
    # fields that contradict each other
    ({"model_data_memory": "2GB", "device_memory": "1GB"}, "model_data_memory=2000000000 is more than device_memory"),
    ({"reuse_fp16_shard": True, "accumulate_dtype": "fp32"}, "leave one of the two out"),
    ({"train_batch_size": 10, "gradient_accumulation_steps": 3}, "train_batch_size=10 is not a multiple of"),
    ({"train_batch_size": 0}, "train_batch_size must be above 0, found 0"),
    ({"train_batch_size": 2.5}, "train_batch_size must be a whole number, found 2.5"),
    ({"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps must be a whole number, found '4'"),
    # optimizers and schedules
    (adam(learning_rate=1e-3), "optimizer.params.learning_rate is not an argument of AdamW; the nearest is 'lr'"),
    (adam(lr=-1.0), "params are not valid for AdamW: Invalid learning rate: -1.0"),
    ({"optimizer": {"type": "Adm"}}, "optimizer.type='Adm' is not known; the nearest is 'Adam'"),
    (
        {"optimizer": {"type": "Lamb"}},
        "optimizer.type='Lamb' is refused: PyTorch has none: give initialize()",
    ),
    ({"optimizer": {"type": "Muon", "params": {"momentun": 0.9}}}, "of the Adam beside it; the nearest is 'momentum'"),
    ({"optimizer": {"type": "Muon", "params": {"lr": -1.0}}}, "params are not valid for Muon: Learning rate should be"),
    ({"optimizer": {"type": "Muon", "params": {"muon_lr": "0.1"}}}, "params.muon_lr='0.1' is a string"),
    ({"optimizer": {"type": "OneBitAdam"}}, "its exchange of 1-bit gradients does not exist here"),
    ({"optimizer": {"params": {}}}, "optimizer.type is missing"),
    ({"optimizer": "AdamW"}, "optimizer must be a mapping of keys to values, found 'AdamW'"),
    ({"optimizer": {"type": "SGD", "parameters": {}}}, "optimizer.parameters is not a key; the nearest valid one is"),
    ({"scheduler": {"type": "Cosine"}}, "scheduler.type='Cosine' is not known; the nearest is 'WarmupCosineLR'"),
    ({"scheduler": {"type": "ReduceLROnPlateau"}}, "scheduler.type='ReduceLROnPlateau' is not known (valid: WarmupLR"),
    ({"scheduler": {"type": "StepLR"}}, "missing 1 required positional argument: 'step_size'"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps is missing"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
        "scheduler.params.warmup_steps is not a key; the nearest valid one is 'warmup_num_steps'",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
        "params.warmup_type must be 'log' or 'linear', found 'cosine'",
    ),
    # DeepSpeed's keys
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
    (zero(stage=0, offload_optimizer={"device": "cpu"}), f"{ZERO}.{OFFLOAD}.device asks for offload at stage 0"),
    ({ZERO: {"cpu_offload": True}}, f"{ZERO}.cpu_offload asks for offload at stage 0: set {ZERO}.stage to 1, 2 or 3"),
    (zero(stage=2, offload_param={"device": "cpu"}), "offloads parameters, which needs zero_optimization.stage 3"),
    (
        zero(offload_optimizer={"device": "gpu"}),
        f"{ZERO}.{OFFLOAD}.device must be 'none', 'cpu' or 'nvme', found 'gpu'",
    ),
    (zero(offload_optimizer="cpu"), f"{ZERO}.{OFFLOAD} must be a mapping of keys to values, found 'cpu'"),
    (zero(offload_optimizer={"device": "nvme"}), f"{ZERO}.{OFFLOAD}.device='nvme' needs nvme_path beside it"),
    (zero(offload_param={"device": "nvme"}), "offload_param.device='nvme' needs nvme_path beside it"),
    ({"disk_optim_frac": 0.5}, "disk_optim_frac=0.5 needs disk_path="),
    ({"disk_optim_frac": 2, "disk_path": "."}, "disk_optim_frac must be a number from 0 to 1, found 2"),
    (zero(offload_optimizer={"device": "cpu", "ratio": 30}), f"{ZERO}.{OFFLOAD}.ratio must be at most 1, found 30"),
    (zero(stage=4), f"{ZERO}.stage must be 0, 1, 2 or 3, found 4"),
    (zero(stage="auto"), f'{ZERO}.stage is "auto", which nothing decides here: write the value'),
    (zero(overlap_comm="yes"), f"{ZERO}.overlap_comm must be true or false, found 'yes'"),
    (zero(reduce_bucket_size="500MB"), f"{ZERO}.reduce_bucket_size must be a whole number, found '500MB'"),
    (zero(reduce_bucket_size=-1), f"{ZERO}.reduce_bucket_size must be at least 0, found -1"),
    (zero(overlap_com=True), f"{ZERO}.overlap_com is not a key; the nearest valid one is '{ZERO}.overlap_comm'"),
    (zero(offload_optimiser={}), f"{ZERO}.offload_optimiser is not a key; the nearest valid one is '{ZERO}.{OFFLOAD}"),
    (zero(prefetch_bucket_size=5, stage3_prefetch_bucket_size=5), "are one key; leave one out"),
    ({"shard_group_size": 0}, "shard_group_size must be a number of ranks, of at least 1, or None, found 0"),
    (
        zero(zero_hpz_partition_size=-2),
        "zero_hpz_partition_size must be a number of ranks, of at least 2, or None, found",
    ),
    (zero(zeropp_loco_param={"err_beta": 0.8}), "what quantising gradients loses is not added to the next ones"),
    (
        {"quantized_weights": 2},
        "quantized_weights must be 8 or 4, the bits of an element that travels, or None, found 2",
    ),
    ({ZERO: {}, "clip_grad_norm": 1.0}, "clip_grad_norm is not a key; the nearest valid one is 'gradient_clipping'"),
    ({ZERO: {}, "gradient_clipping": -1}, "gradient_clipping must be at least 0, found -1"),
    ({ZERO: {}, "fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale must be a finite number above 0"),
    ({ZERO: {}, "fp16": True}, "fp16 must be a mapping of keys to values, found True"),
    ({ZERO: {}, "wandb": True}, "wandb must be a mapping of keys to values, found True"),
    ({ZERO: {}, "torch_autocast": {"enabled": True, "dtype": "int8"}}, "'int8' is no dtype"),
    ({ZERO: {}, "elasticity": {"enabled": True}}, "the number of ranks is fixed while a script runs"),
    (
        {ZERO: {}, "communication_data_type": "int8"},
        "communication_data_type must be 'fp32', 'fp16', 'bfp16' or 'bf16'",
    ),
    ({ZERO: {}, **adam(lr=1e-3, max_grad_norm=1.0)}, "max_grad_norm=1.0 is refused: write gradient_clipping instead"),
    # Colossal-AI's keys
    ({"zero": {}, "fp16": {"mode": "naive"}}, "zero makes the weights fp16 already, so leave fp16 out"),
    ({"fp16": {"mode": "O2"}, "gradient_accumulation": 2}, "fp16.mode must be AMP_TYPE.NAIVE, AMP_TYPE.TORCH or"),
    (
        {"zero": {"model_config": {"shard_strat": "tensor"}}},
        "the nearest valid one is 'zero.model_config.shard_strategy'",
    ),
    ({"zero": {}, "parallel": {"pipeline": 2}}, "parallel.pipeline=2 is refused: parameters are divided over"),
    ({"zero": {}, "gradient_accumulation": 0}, "gradient_accumulation must be above 0, found 0"),
    # files
    (
        (".json", '{"stage": 2\n "dtype": "bf16"}'),
        "line 1: a comma is missing at the end of this line, after '{\"stage",
    ),
    ((".json", '{"stage": 2,\n'), "line 1: the text ends before the last bracket is closed"),
    ((".json", "{'stage': 2}"), "line 1: JSON has strings in double quotes only"),
    ((".json", '{"stage": 2,\n ...\n}'), "line 2: '...' stands for the rest of an example"),
    ((".json", '{"stage": 2,\n "stage": 3}'), "line 2: the key 'stage' stands there twice, first in line 1"),
    (
        (".json", '{\n "optimizer": {"type": "SGD",\n  "params": {"lr": 1, "\\u006cr": 2}}}'),
        "line 3: the key 'lr' stands there twice, first in line 3: leave one out",
    ),
    ((".json", '{"clip_grad_norm": NaN}'), "NaN is not a number that a config can hold"),
    ((".json", "[1, 2]"), "a config is a mapping of keys to values, found list"),
    ((".json", '{"device": ' + "[" * 100_000), "brackets are nested too deeply for a config"),
    ((".json", '{\n"stage": 2,\n\t"stge": 3}'), "line 3: stge is not a key; the nearest valid one is 'stage'"),
    ((".json", " \n"), "is empty: a config that only has defaults is {}"),
    ((".yaml", "stage: 2\n  dtype: bf16\n"), "line 2: not valid YAML: mapping values are not allowed here"),
    ((".yaml", "on: true\nstage: 2\n"), "the key True is not a string: put it in quotes"),
    ((".json", '{ // mine\n"stge": 3,}'), "line 2: stge is not a key"),
    ((".yaml", "stage: 2\nstage: 3\n"), "line 2: the key 'stage' stands there twice"),
    ((".yaml", "stage: 2\nmonitors:\n  jsonlines: {}\n"), "line 3: monitors.jsonlines is not a key; the nearest"),
    ((".toml", "stage = 2\ndtype = bf16\n"), "line 2: not valid TOML"),
    ((".toml", "stage = 2\n[loss_scale]\nhysteresis = 0\n"), "line 3: loss_scale.hysteresis must be an integer"),
    ((".py", "stage = 2\nclip = 1 / 0\n"), "line 2: the config raised ZeroDivisionError: division by zero"),
    ((".py", "import colossalai\n"), "line 1: the config raised ModuleNotFoundError: No module named 'colossalai'"),
    ((".py", "raise SystemExit\n"), "line 1: the config raised SystemExit"),
    ((".py", "stage = = 2\n"), "line 1: not valid Python: invalid syntax"),
    (
        (".py", "stage = 2\nzero = dict(\n  model_config=dict(\n    bf16=1))\n"),
        "line 4: zero.model_config.bf16 must be",
    ),
    ((".json", '{"chunk_size": ' + "1" * 5000 + "}"), "Exceeds the limit (4300 digits)"),
    ((".yaml", "stage: 1\nchunk_size: " + "2" * 5000), "Exceeds the limit (4300 digits) for integer"),
    ((".toml", "chunk_size = " + "3" * 5000), "Exceeds the limit (4300 digits) for integer string"),
    ((".yaml", "optimizer: &its {params: *its}\n"), "a mapping or list is a part of itself: write out what it holds"),
    ((".py", "monitors = {}\nmonitors['json_lines'] = monitors\n"), "a mapping or list is a part of itself"),
    ({"rank_timeout": float("inf")}, "rank_timeout must be a number of seconds above 0, found inf"),
    ((".ini", "stage = 2\n"), "the end of the name says the format, one of .json, .yaml, .yml, .toml, .py"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words[:60] for _, words in BAD])
def test_a_bad_config_is_refused_in_one_sentence(
    given: dict[str, Any] | tuple[str, str], words: str, tmp_path: Path
) -> None:
    source: Any = given
    if isinstance(given, tuple):
        source = tmp_path / f"config{given[0]}"
        source.write_text(given[1])
    with pytest.raises(ConfigError) as error:
        load_config(source)
    message = str(error.value)
    assert words in message
    assert len(message.splitlines()) <= 2, "one line for each key that is wrong"
    assert not isinstance(given, tuple) or str(source) in message


def test_the_table_has_at_least_sixty_bad_configs() -> None:
    assert len(BAD) >= 60


VALUES = [True, -1, 2.5, "auto", "x", [], {"a": {"b": 1}}, float("nan"), b"x"]


@pytest.mark.parametrize("dialect", TABLES)
def test_no_value_of_any_key_is_an_error_of_another_kind(dialect: Dialect) -> None:
    refused = []
    for path in TABLES[dialect].by_path:
        for value in VALUES:
            config: Any = value
            for part in reversed(path.replace("*", "lr").split(".")):
                config = {part: config}
            try:
                load_config(config, dialect=dialect).canonical()
            except ConfigError as error:
                refused.append(str(error))
    assert len(refused) > len(TABLES[dialect].by_path), "most of these values are wrong"
    assert not [words for words in refused if "Input should" in words], "those are pydantic's words"


def missing(folder: Path) -> Path:
    return folder / "missing.json"


def directory(folder: Path) -> Path:
    (folder / "config.json").mkdir()
    return folder / "config.json"


def huge(folder: Path) -> Path:
    path = folder / "config.json"
    with path.open("wb") as file:
        file.truncate(100 * 10**6)
    return path


def not_text(folder: Path) -> Path:
    path = folder / "config.json"
    path.write_bytes(b"\x93NUMPY\x01\x00")
    return path


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "config.json")
    return folder / "config.json"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (missing, "missing.json does not exist (looked for in"),
        (directory, "config.json is a directory: give the path of a config file in it"),
        (huge, "has 95.37 MiB; a config has at most 1 MiB: is this the right file?"),
        (not_text, "is not text in UTF-8: invalid start byte at byte 0"),
        (pipe, "is not a regular file"),
    ],
)
def test_what_is_no_config_file_is_said_before_it_is_read(
    made: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    path = made(tmp_path)
    for source in (path, str(path)):
        with pytest.raises(ConfigError) as error:
            load_config(source)
        assert words in str(error.value)


def test_batch_sizes_are_compared_once_the_number_of_ranks_is_known() -> None:
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    load_config(sizes, world_size=2)
    with pytest.raises(
        ConfigError, match=r"train_batch_size=16 is not .*=2 \* .*=4 \* 3 ranks = 24: change one of them"
    ):
        load_config(sizes, world_size=3)
    with pytest.raises(ConfigError, match=r"train_batch_size=16 is not .* = 8: change one of them"):
        load_config(sizes, world_size=1)
    with pytest.raises(ConfigError, match="train_batch_size=16 is not a multiple of 3 ranks"):
        load_config({"train_batch_size": 16}, world_size=3)


def test_every_key_that_is_wrong_has_a_line() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"stage": 7, "drop_last": "no", "clip": 1.0})
    assert [line.split()[1] for line in str(error.value).splitlines()] == ["stage", "drop_last", "clip"]


def test_python_configs_do_not_run_where_that_is_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.py"
    path.write_text("raise AssertionError('ran')")
    monkeypatch.setenv("GEMINI_NO_EXEC", "1")
    with pytest.raises(
        ConfigError, match="a Python config is code, which GEMINI_NO_EXEC=1 forbids to run: write it as"
    ):
        load_config(path)


@pytest.mark.parametrize("source", [3, ["config.json"], b"config.json"], ids=repr)
def test_what_is_neither_mapping_nor_path_is_told(source: Any) -> None:
    with pytest.raises(ConfigError, match="a config is a mapping or the path of a file, found"):
        load_config(source)
    with pytest.raises(ConfigError, match="dialect must be 'gemini', 'deepspeed', 'colossal' or None, found 'fsdp'"):
        load_config({}, dialect="fsdp")  # type: ignore[arg-type]
