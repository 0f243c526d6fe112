"""What to use here in place of names of other libraries' that are not here: the text of an AttributeError."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

# -- DeepSpeed's names, under `gemini.deepspeed`.


_PIPELINE = "there is no pipeline: a model of any size is sharded over all ranks, see docs/quick_start.md"
_MOE = "experts are sharded as all weights are: give initialize() the plain module (gemini.set_leaf_module)"
_INFERENCE = "evaluate with engine.eval() and engine.gathered_for_generation(), or ShardedModel without an optimizer"
_KERNELS = "use torch's own layers: scaled_dot_product_attention, torch.compile"
_CHECKPOINTING = "use torch.utils.checkpoint.checkpoint, of any kind"
_CONFIG = "gemini.engine.config.load_config(path) reads and checks a config; engine.config is an engine's"
_TIMES = "gemini.engine.trainer.Throughput counts samples and FLOPs, torch.profiler has the times"
_ONE_GROUP = "all ranks of engine.data_parallel_group share the model; there are no tensor, sequence or expert groups"
_CURRICULA = "choose samples in the script's own dataset or sampler"
_FP32 = "gemini.deepspeed.utils.zero_to_fp32 has it"
_COMPRESSION = "it changes the model's result: do it on the plain module, before initialize()"
_SETTINGS = "engine.config and engine.model.settings have what was chosen, docs/config.md what its keys do"

# By the name's last part, and by how it begins (with a star).
_INSTEAD = {
    "pipe": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "LayerSpec": _PIPELINE,
    "TiedLayerSpec": _PIPELINE,
    "eval_batch": "call engine(batch) under torch.no_grad()",
    "moe": _MOE,
    "MoE": _MOE,
    "init_inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "DeepSpeedHybridEngine": _INFERENCE,
    "inference": _INFERENCE,
    "module_inject": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "DeepSpeedTransformerConfig": _KERNELS,
    "replace_transformer_layer": _KERNELS,
    "checkpointing": _CHECKPOINTING,
    "activation_checkpointing": _CHECKPOINTING,
    "DeepSpeedConfig": _CONFIG,
    "DeepSpeedConfigError": "gemini.ConfigError",
    "_config": _CONFIG,
    "add_tuning_arguments": "give initialize() a config with 'scheduler'",
    "tp_model_init": _ONE_GROUP,
    "groups": _ONE_GROUP,
    "mpu": _ONE_GROUP,
    "get_sequence_parallel_group": _ONE_GROUP,
    "get_model_parallel_rank": _ONE_GROUP,
    "get_tensor_parallel_rank": _ONE_GROUP,
    "get_data_parallel_rank": "engine.global_rank",
    "DeepSpeedOptimizer": "gemini.ShardedOptimizer",
    "DeepSpeedZeroOptimizer": "gemini.ShardedOptimizer",
    "DeepSpeedZeroOptimizer_Stage3": "gemini.ShardedOptimizer",
    "DeepSpeedDataLoader": "engine.deepspeed_io(dataset), or torch.utils.data.DataLoader",
    "OnDevice": "torch.device('meta') as a context, or gemini.ZeroInitContext()",
    "TiledLinear": "chunks are as large as one weight: give device_memory= and see plan.explain()",
    "partition_parameters": "parameters have their true shape; GatheredParameters and safe_get_full_* read them",
    "swap_tensor": _SETTINGS,
    "transformer": _KERNELS,
    "sparse_attention": _KERNELS,
    "sequence": _ONE_GROUP,
    "hybrid_engine": _INFERENCE,
    "launcher": "torchrun starts the ranks",
    "elasticity": "a checkpoint is loaded on any number of ranks",
    "monitor": "engine.monitor.write_events(), and the config's tensorboard and csv_monitor",
    "env_report": "gemini.__version__ and torch.utils.collect_env",
    "git_version_info": "gemini.__version__",
    "data_pipeline": _CURRICULA,
    "checkpoint": "engine.save_checkpoint(), load_checkpoint(); `gemini checkpoint import` reads DeepSpeed's folders",
    "DeepSpeedCPULion": "any elementwise optimizer of torch's works; its state may rest on the host",
    "FusedLamb": "LAMB needs norms of whole layers, which no chunk has: FusedAdam, or a torch optimizer",
    "get_fp32_state_dict_from_zero_checkpoint": _FP32,
    "load_state_dict_from_zero_checkpoint": _FP32,
    "convert_zero_checkpoint_to_fp32_state_dict": _FP32,
    "save_fp16_model": "save_16bit_model()",
    "instrument_w_nvtx": "torch.profiler.record_function",
    "timer": _TIMES,
    "SynchronizedWallClockTimer": _TIMES,
    "ThroughputTimer": _TIMES,
    "timers": _TIMES,
    "get_wall_clock_timers": _TIMES,
    "wall_clock_breakdown": _TIMES,
    "profiling": _TIMES,
    "flops_profiler*": _TIMES,
    "log_summary": _TIMES,
    "autotuning*": "`gemini plan` finds settings by itself, see docs/plan.md",
    "compression*": _COMPRESSION,
    "quantize*": _COMPRESSION,
    "eigenvalue*": _COMPRESSION,
    "progressive_layer_drop": _COMPRESSION,
    "pld_*": _COMPRESSION,
    "get_pld_theta": _COMPRESSION,
    "random_ltd*": _CURRICULA,
    "curriculum*": _CURRICULA,
    "data_efficiency*": _CURRICULA,
    "set_custom_curriculum_learning_schedule": _CURRICULA,
    "set_data_post_process_func": _CURRICULA,
    "zero_*": _SETTINGS,
    "aio_config": _SETTINGS,
    "swap_tensor_config": _SETTINGS,
    "amp_enabled": "weights are 16-bit with fp32 masters: fp16_enabled(), bfloat16_enabled()",
    "clip_grad_norm_": "gemini.clip_grad_norm_, or the config's gradient_clipping",
    "get_ma_status": "get_accelerator().memory_allocated()",
}


def instead_of(name: str) -> str | None:
    """What to use in place of a name of DeepSpeed's; None for a name of nobody's."""
    starts = (words for key, words in _INSTEAD.items() if key.endswith("*") and name.startswith(key[:-1]))
    return _INSTEAD.get(name) or next(starts, None)


_HERE = "docs/coming_from.md lists those that are here"


def missing(owner: str, name: str, otherwise: str = _HERE) -> AttributeError:
    """The error of a module or object `owner` that has no such name. Raises ImportError where it is imported.

    otherwise: what is said of names that are not in the table.
    """
    words = _words(owner, name)
    text = f"{owner} has no {name!r}: {words or otherwise}"
    # `from package import name` asks the package first, and drops the text of an AttributeError.
    caller = sys._getframe(2)
    if caller.f_code.co_name == "_handle_fromlist" and words is not None:
        raise ImportError(text, name=owner)
    return AttributeError(text, name=name)


def _words(owner: str, name: str) -> str | None:
    """What the table says of a name, or of the innermost of the packages that would have it."""
    parts = (*owner.split("."), name)
    return next((words for words in map(instead_of, reversed(parts)) if words is not None), None)


class AbsentModules(MetaPathFinder):
    """Asked by Python for a module that no other finder has: one of DeepSpeed's that is not here says what to use.

    Without it `import gemini.deepspeed.pipe` would end in Python's own ModuleNotFoundError, which names no way.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Raises ModuleNotFoundError for a module of the package; None for any other."""
        owner, _, name = fullname.rpartition(".")
        if owner == self._package or owner.startswith(f"{self._package}."):
            # With the name Python takes `from package import name` for one that the package does not have.
            raise ModuleNotFoundError(f"{owner} has no module {name!r}: {_words(owner, name) or _HERE}", name=fullname)
