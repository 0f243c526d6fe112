"""DeepSpeed's JSON as it is: its documentation's examples, every key of its config classes, "auto"."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import BudgetError, Settings, ShardedModel
from gemini.engine.config import load_config
from gemini.engine.config.deepspeed_keys import TABLE
from gemini.engine.config.key import MappedTo
from gemini.errors import ConfigError
from gemini.placement.demand import Kind, Tier
from gemini.placement.policies import OptimizerOnHostPolicy
from tests.zoo.mlp import CHUNK_NUMEL, build

EXAMPLES = Path(__file__).resolve().parents[1] / "configs"
MISSING_COMMA = {"zero3_offload_param": 6, "zero3_nvme": 7}  # the line where each misses a comma


def example(name: str, folder: Path, mended: bool = True) -> Path:
    """A file with the example, without the dots that stand for the user's own keys."""
    text = (EXAMPLES / f"{name}.json").read_text()
    assert text.count("    ...\n") == 1
    lines = text.replace("    ...\n", "").splitlines()
    if mended and name in MISSING_COMMA:
        lines[MISSING_COMMA[name] - 1] += ","
    path = folder / f"{name}.json"
    path.write_text("\n".join(lines))
    return path


NAMES = sorted(path.stem for path in EXAMPLES.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_of_the_documentation_parses(name: str, tmp_path: Path) -> None:
    config = load_config(example(name, tmp_path))
    assert config.stage == 3
    without_effect = ["zero_optimization.mics_hierarchical_params_gather"] if name == "mics" else []
    assert [key for key, _ in config.ignored] == without_effect
    assert config.shard_group_size == (8 if name == "mics" else None)


def test_groups_that_do_not_fill_the_ranks_are_refused_at_their_key(tmp_path: Path) -> None:
    assert load_config(example("mics", tmp_path), world_size=16).settings() == Settings(shard_group_size=8)
    with pytest.raises(ConfigError, match=r"line 4: .*shard_group_size=8 does not divide 12 ranks into groups"):
        load_config(example("mics", tmp_path), world_size=12)


def test_what_the_examples_become(tmp_path: Path) -> None:
    first = load_config(example("zero3", tmp_path))
    assert first.settings() == Settings(stage=3, dtype=torch.float16)
    assert first.optimizer is not None
    made = first.optimizer.make([torch.nn.Parameter(torch.zeros(1))])
    group = made.param_groups[0]
    assert (type(made).__name__, group["adamw_mode"]) == ("HybridAdam", True)
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.001, [0.8, 0.999], 1e-8, 3e-7)
    assert (
        load_config(example("zero3_offload_optimizer", tmp_path)).settings().shared()[2].endswith("optimizer_on_host")
    )
    assert load_config(example("zero3_offload_param", tmp_path)).settings().tensor_placement_policy == "cpu"
    on_disk = load_config(example("zero3_nvme", tmp_path)).settings()
    assert (on_disk.tensor_placement_policy, on_disk.disk_path, on_disk.disk_fraction) == ("cpu", "/nvme_data", 1.0)


@pytest.mark.parametrize(
    ("offload", "policy", "disk", "ignored"),
    [
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}, "optimizer_on_host", ("/n", 1.0), []),
        ({"offload_optimizer": {"device": "cpu", "nvme_path": "/n"}}, "optimizer_on_host", (None, 0.0), ["nvme_path"]),
        ({"offload_param": {"device": "nvme", "nvme_path": "/n"}}, "cpu", ("/n", 0.0), []),
        ({"offload_param": {"device": "cpu", "nvme_path": "/n"}}, "cpu", (None, 0.0), ["nvme_path"]),
        (
            {
                "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratio": 0.5},
                "offload_param": {"device": "cpu"},
            },
            "optimizer_on_host(ratio=0.5, offloads_params)",
            ("/n", 1.0),
            [],
        ),
        (
            {
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/n",
                    "buffer_count": 4,
                    "buffer_size": 10**8,
                    "pin_memory": True,
                    "pipeline": True,
                    "pipeline_read": True,
                    "pipeline_write": False,
                    "fast_init": True,
                }
            },
            "optimizer_on_host",
            ("/n", 1.0),
            ["buffer_count", "buffer_size", "pin_memory", "pipeline", "pipeline_read", "pipeline_write", "fast_init"],
        ),
    ],
)
def test_what_nvme_becomes(
    offload: dict[str, Any], policy: str, disk: tuple[str | None, float], ignored: list[str]
) -> None:
    aio = {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
    config = load_config({"zero_optimization": {"stage": 3, **offload}, "aio": aio})
    settings = config.settings()
    assert settings.policy.name == policy
    assert (settings.disk_path, settings.disk_fraction) == disk
    said = [key.rpartition(".")[2] for key, _ in config.ignored if not key.startswith("aio")]
    assert sorted(said) == sorted(ignored)
    assert len(config.ignored) - len(said) == len(aio)


def test_the_disk_in_our_own_keys(tmp_path: Path) -> None:
    given = {"tensor_placement_policy": "disk", "disk_path": str(tmp_path), "disk_memory": "1GiB"}
    settings = load_config(given).settings()
    assert (settings.policy.name, settings.disk_path, settings.disk_memory) == ("disk", str(tmp_path), 2**30)
    with pytest.raises(ConfigError, match="'disk' needs disk_path="):
        load_config({"tensor_placement_policy": "disk"})


@pytest.mark.parametrize("name", sorted(MISSING_COMMA))
def test_a_missing_comma_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(example(name, tmp_path, mended=False))
    assert f"line {MISSING_COMMA[name]}: a comma is missing at the end of this line, after '}}'" in str(error.value)


def test_dots_of_an_example_are_told(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text((EXAMPLES / "zero3.json").read_text())
    with pytest.raises(ConfigError, match=r"line 20: '...' stands for the rest of an example"):
        load_config(path)


# every key of the classes DeepSpeedZeroConfig, DeepSpeedZeroOffloadParamConfig and DeepSpeedZeroOffloadOptimizerConfig,
# and of the pages on the whole JSON, as DeepSpeed's documentation lists them
DOCUMENTED = {
    "zero_optimization": """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint
        sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size
        stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold
        model_persistence_threshold stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters
        max_reuse_distance stage3_max_reuse_distance gather_16bit_weights_on_model_save
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save ignore_unused_parameters
        legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients mics_shard_size mics_hierarchical_params_gather
        memory_efficient_linear pipeline_loading_checkpoint override_module_apply module_granularity_threshold
        stage3_module_granularity_threshold use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params
        zeropp_loco_param log_trace_cache_warnings""",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio""",
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
        communication_data_type prescale_gradients gradient_predivide_factor sparse_gradients steps_per_print
        wall_clock_breakdown dump_state amp autotuning elasticity sparse_attention data_efficiency curriculum_learning
        compression_training wandb comet progressive_layer_drop zero_allow_untested_optimizer fp32_allreduce""",
    "optimizer": "type params.lr params.betas params.eps params.weight_decay params.torch_adam params.adam_w_mode",
    "scheduler": "type params.warmup_min_lr params.warmup_max_lr params.warmup_num_steps",
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale""",
    "bf16": "enabled",
    "data_types": "grad_accum_dtype",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "aio": "block_size queue_depth thread_count single_submit overlap_events",
    "flops_profiler": "enabled profile_step module_depth top_modules detailed output_file",
    "activation_checkpointing": """
        partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
        synchronize_checkpoint_boundary profile""",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write",
}


@pytest.mark.parametrize("section", DOCUMENTED)
def test_the_table_has_every_documented_key(section: str) -> None:
    paths = [tuple(f"{section}.{name}".strip(".").split(".")) for name in DOCUMENTED[section].split()]
    assert [path for path in paths if TABLE.key_of(path) is None] == []


def test_no_key_stands_in_the_table_twice() -> None:
    paths = [path for key in TABLE.keys for path in key.paths]
    assert sorted(set(paths)) == sorted(paths)


def test_keys_without_effect_are_said_once_with_what_happens_instead() -> None:
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "stage3_max_reuse_distance": 10**9}
    config = load_config({"zero_optimization": zero, "wall_clock_breakdown": False})
    ignored = dict(config.ignored)
    assert len(ignored) == len(config.ignored) == 4
    assert "`chunk_size`" in ignored["zero_optimization.reduce_bucket_size"]
    assert "leaves first" in ignored["zero_optimization.stage3_max_reuse_distance"]
    assert config.canonical() == load_config({"zero_optimization": {"stage": 2}}).canonical()


def test_keys_without_effect_are_said_in_the_order_of_the_file() -> None:
    """The last of them is one that has no effect beside what another key says."""
    optimizer = {"device": "none", "ratio": 0.5}
    zero = {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True, "offload_optimizer": optimizer}
    config = load_config({"wall_clock_breakdown": True, "prescale_gradients": True, "zero_optimization": zero})
    assert [key.rpartition(".")[2] for key, _ in config.ignored] == [
        "wall_clock_breakdown",
        "prescale_gradients",
        "reduce_bucket_size",
        "overlap_comm",
        "ratio",
    ]


FULL: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False, "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 5, "loss_scale_window": 20, "hysteresis": 3},
    "bf16": {"enabled": False},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 2, "ignore_unused_parameters": False, "mics_shard_size": -1},
    "tensorboard": {"enabled": True, "output_path": "runs"},
    "csv_monitor": {"enabled": False, "output_path": "csv"},
    "wandb": {"enabled": False},
}


def test_a_whole_config_becomes_ours() -> None:
    config = load_config(FULL, world_size=4)
    assert config.settings() == Settings(
        stage=2,
        dtype=torch.float16,
        reduce_dtype=torch.float32,
        accumulate_dtype=torch.float32,
        ignore_unused_parameters=False,
    )
    assert config.batch_sizes(4).accumulation == 4
    options = config.optimizer_options()
    assert (options["clip_grad_norm"], options["initial_scale"], options["growth_interval"]) == (0.5, 32.0, 20)
    assert options["hysteresis"] == 3
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-4, "adamw_mode": False}
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == 100
    assert config.monitors.tensorboard is not None
    assert config.monitors.tensorboard.output_path == "runs"
    assert config.monitors.json_lines is None
    assert config.steps_per_print == 10


def test_a_static_loss_scale_does_not_move() -> None:
    options = load_config({"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 20}}).optimizer_options()
    assert {options["initial_scale"], options["min_scale"], options["max_scale"]} == {128.0}


@pytest.mark.parametrize(
    ("zero", "same_as"),
    [
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload_param": True}, {"offload_param": {"device": "cpu"}}),
        ({"offload_param": {"device": "none"}}, {}),
        ({"offload_param": None, "cpu_offload": False}, {}),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, {"cpu_offload_param": True}),
        ({"stage3_gather_fp16_weights_on_model_save": True}, {"gather_16bit_weights_on_model_save": True}),
    ],
    ids=str,
)
def test_old_spellings_are_read(zero: dict[str, Any], same_as: dict[str, Any]) -> None:
    found, other = (load_config({"zero_optimization": {"stage": 3, **keys}}) for keys in (zero, same_as))
    assert found.canonical() == other.canonical()


def test_the_oldest_forms_are_read() -> None:
    assert load_config({"zero_optimization": True, "allgather_size": 5e8}).stage == 1
    assert load_config({"bfloat16": {"enabled": True}, "zero_optimization": {}}).dtype == torch.bfloat16
    assert load_config({"bf16": {"enabled": True}}).stage == 0, "DeepSpeed's default"


def test_auto_is_resolved_by_who_knows_or_by_a_default_that_is_said() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    }
    auto = {"optimizer.params.lr": 0.25, "bf16.enabled": True, "train_micro_batch_size_per_gpu": 4}
    known = load_config(config, auto=auto)
    assert known.optimizer is not None
    assert (known.optimizer.params, known.dtype) == ({"lr": 0.25}, torch.bfloat16)
    assert known.batch_sizes(2).train == 8
    unknown = load_config(config)
    assert unknown.optimizer is not None
    assert (unknown.optimizer.params, unknown.dtype, unknown.clip_grad_norm) == ({}, None, None)
    assert dict(unknown.ignored)["optimizer.params.lr"] == '"auto": the optimizer\'s default'


TRAINER: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto")},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_a_config_for_a_hugging_face_trainer_is_read_with_and_without_the_trainers_values() -> None:
    config = load_config(TRAINER)
    assert config.settings() == Settings(stage=3, max_live_parameters=10**9)
    assert config.batch_sizes(2).accumulation == 1
    known = {"bf16.enabled": True, "gradient_clipping": 1.0, "scheduler.params.warmup_num_steps": 5}
    config = load_config(TRAINER, auto=known)
    assert (config.dtype, config.clip_grad_norm) == (torch.bfloat16, 1.0)
    assert config.scheduler is not None
    assert config.scheduler.params == {"warmup_num_steps": 5}


@pytest.mark.parametrize(("numel", "most"), [(0, 0), (5e7, None), ("auto", None)])
def test_a_prefetch_bucket_without_elements_is_no_prefetch(numel: Any, most: int) -> None:
    config = load_config({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": numel}})
    assert config.settings() == Settings(max_prefetch=most)


def test_the_dialect_can_be_said_where_keys_are_common() -> None:
    common = {"optimizer": {"type": "Adam"}, "train_batch_size": 8}
    kinds = [load_config(common, dialect=dialect).optimizer.type for dialect in (None, "deepspeed")]  # type: ignore
    assert kinds == ["Adam", "HybridAdam"]


def test_an_optimizer_on_the_host_leaves_parameters_on_the_device() -> None:
    config = load_config({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})
    model = ShardedModel(build(), settings=config.settings(), chunk_size=CHUNK_NUMEL, device="emulated")
    for home in model.plan.placement.homes:
        assert {kind for kind, tier in home.items() if tier is Tier.DEVICE} == {Kind.PARAM}
    least = model.plan.minimum_bytes
    tight = ShardedModel(
        build(), settings=config.settings(), chunk_size=CHUNK_NUMEL, device="emulated", model_data_memory=least
    )
    assert tight.plan.device_bytes <= least, "where parameters do not fit, the placement is that of 'auto'"
    with pytest.raises(BudgetError):
        OptimizerOnHostPolicy().place(model.plan.demand, least - 1)


def test_every_mapped_key_names_a_field() -> None:
    from gemini.engine.config.config import Config
    from gemini.engine.config.load import _field_names

    fields = set(_field_names(Config))
    targets = {key.effect.to.removesuffix(".*") for key in TABLE.keys if isinstance(key.effect, MappedTo)}
    assert {target for target in targets if target not in fields} <= {
        "optimizer.params.adamw_mode",
        "optimizer.params.state_dtype",
    }


@pytest.mark.parametrize(
    "own", [{"device_memory": "64MiB"}, {"gemini": {"device_memory": "64MiB"}}], ids=["key", "section"]
)
def test_budgets_stand_beside_deepspeeds_keys(own: dict[str, Any]) -> None:
    theirs = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    for zero in ({}, {"zero_optimization": {"stage": 2}}):
        found = load_config({**theirs, **zero, **own}, prefers="deepspeed")
        expected = load_config({**theirs, **zero}, prefers="deepspeed")
        assert found.settings().device_memory == 64 * 2**20
        assert found.optimizer == expected.optimizer and found.stage == expected.stage


def test_a_section_of_our_keys_is_checked_and_may_not_contradict() -> None:
    zero = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match=r"gemini.stage=3 contradicts zero_optimization.stage: leave one"):
        load_config({**zero, "gemini": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"gemini.device_memori is not a key"):
        load_config({**zero, "gemini": {"device_memori": 1}})
    with pytest.raises(ConfigError, match="device_memory"):
        load_config({**zero, "device_memory": "much"})


def test_a_misspelt_section_is_answered_with_the_one_that_is_meant() -> None:
    for other in ({}, {"train_batch_size": 2}):
        with pytest.raises(ConfigError, match="zero_optimisation is not a key; the nearest valid one is 'zero_optimiz"):
            load_config({"zero_optimisation": {"stage": 2}, **other})


@pytest.mark.parametrize(
    ("rate", "words"),
    [("1e-3", "lr='1e-3' is a string: write the number 0.001"), ("auto", 'lr is "auto", which nothing')],
)
def test_a_rate_that_is_no_number_says_what_to_write(rate: str, words: str) -> None:
    for dialect in ("gemini", "deepspeed"):
        for kind in ("Adam", "SGD"):
            config = {"optimizer": {"type": kind, "params": {"lr": rate}}}
            if (dialect, rate) != ("deepspeed", "auto"):
                with pytest.raises(ConfigError, match=words):
                    load_config(config, dialect=dialect)
    with pytest.raises(ConfigError, match='clip_grad_norm is "auto", which nothing decides here'):
        load_config({"clip_grad_norm": "auto"})
