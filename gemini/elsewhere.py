"""What to use here in place of names of other libraries' that are not here: the text of an AttributeError."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

# -- DeepSpeed's names, under `gemini.deepspeed`.


_PIPELINE = "there is no pipeline: a model of any size is sharded over all ranks, see docs/quick_start.md"
_MOE = "experts are sharded as all weights are: give initialize() the plain module (gemini.set_leaf_module)"
_INFERENCE = "evaluate with engine.eval() and engine.gathered_for_generation(), or ShardedModel without an optimizer"
_KERNELS = "use torch's own layers: scaled_dot_product_attention, torch.compile"
_CHECKPOINTING = "use torch.utils.checkpoint.checkpoint, of any kind"
_CONFIG = "gemini.engine.config.load_config(path) reads and checks a config; engine.config is an engine's"
_TIMES = "gemini.engine.trainer.Throughput counts samples and FLOPs, torch.profiler has the times"
_ONE_GROUP = (
    "all ranks of engine.data_parallel_group share the model; other groups are those of your own DeviceMesh, of which "
    "gemini.initialize(device_mesh=) takes the dimensions of the data: docs/parallelism.md"
)
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
    "TiledLinearReturnBias": "gemini.TiledLinear: a module around it may return its bias",
    "partition_parameters": "parameters have their true shape; GatheredParameters and safe_get_full_* read them",
    "swap_tensor": _SETTINGS,
    "transformer": _KERNELS,
    "sparse_attention": _KERNELS,
    "sequence": _ONE_GROUP,
    "hybrid_engine": _INFERENCE,
    "launcher": "torchrun starts the ranks",
    "elasticity": "a checkpoint is loaded on any number of ranks",
    "monitor": "engine.monitor.write_events(), and the config's tensorboard and csv_monitor",
    "env_report": "`gemini doctor`, on the command line",
    "git_version_info": "gemini.__version__",
    "data_pipeline": _CURRICULA,
    "checkpoint": "engine.save_checkpoint(), load_checkpoint(); `gemini checkpoint import` reads DeepSpeed's folders",
    "DeepSpeedCPULion": "any elementwise optimizer of torch's works; its state may rest on the host",
    "FusedLamb": "gemini.per_tensor(optimizer) of a LAMB of your own, FusedAdam, or a torch optimizer",
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
    """The error of a module or object `owner` that has no such name of DeepSpeed's.

    otherwise: what is said of names that are not in the table. Raises ImportError where the name is imported.
    """
    words = _words(owner, name)
    return _absent(f"{owner} has no {name!r}: {words or otherwise}", owner, name, is_known=words is not None)


def refusing(owner: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of a module, which raises the AttributeError of every name of DeepSpeed's that it does not have."""

    def refuse(name: str) -> NoReturn:
        raise missing(owner, name)

    return refuse


def _absent(text: str, owner: str, name: str, is_known: bool) -> AttributeError:
    # `from package import name` asks the package first, and drops the text of an AttributeError. The caller's caller
    # is `__getattr__`, and this is who asked that.
    caller = sys._getframe(3)
    if caller.f_code.co_name == "_handle_fromlist" and is_known:
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


# -- Colossal-AI's names, of any release, as attributes of `gemini`.


_WRAPPED = "gemini.ShardedModel(module, tensor_placement_policy=...)"
_BUILDS = "gemini.ZeroInitContext, with the same arguments"
_UPDATES = "gemini.ShardedOptimizer(model, optimizer) of the wrapped model and a plain optimizer"
_BOOSTER = (
    "gemini.initialize(model, optimizer, criterion, config=...) makes an engine; a config's 'plugin' takes the "
    "arguments of GeminiPlugin"
)

_OF_COLOSSALAI = {
    "ShardedModelV2": _WRAPPED,
    "GeminiDDP": _WRAPPED,
    "ZeroDDP": _WRAPPED,
    "ColoDDP": _WRAPPED,
    "zero_model_wrapper": _WRAPPED,
    "ColoInitContext": _BUILDS,
    "LazyInitContext": _BUILDS,
    "ShardedOptimizerV2": _UPDATES,
    "ZeroOptimizer": _UPDATES,
    "GeminiOptimizer": _UPDATES,
    "LowLevelZeroOptimizer": f"{_UPDATES}, at stage=1 or 2",
    "zero_optim_wrapper": _UPDATES,
    "GeminiAdamOptimizer": "gemini.ShardedOptimizer(model, gemini.HybridAdam(model.parameters(), lr=...))",
    "FusedAdam": "gemini.HybridAdam",
    "GeminiManager": "the model's chunk_manager, a gemini.ChunkManager, comes with gemini.ShardedModel",
    "get_current_device": "gemini.current_device()",
    "get_accelerator": "gemini.current_device() and torch.accelerator",
    "launch": "gemini.launch_from_torch(), under torchrun",
    "DistCoordinator": "torch.distributed, and gemini.get_dist_logger() for lines of rank 0",
    "colo_set_process_memory_fraction": "device_memory= of gemini.ShardedModel",
    "Booster": _BOOSTER,
    "GeminiPlugin": _BOOSTER,
    "LowLevelZeroPlugin": _BOOSTER,
    "TorchDDPPlugin": _BOOSTER,
}


def missing_in_gemini(name: str) -> AttributeError:
    """The error of `gemini`, which has no such name. Raises ImportError where one of Colossal-AI's is imported."""
    words = _OF_COLOSSALAI.get(name)
    text = f"module 'gemini' has no attribute {name!r}" + (f": use {words}" if words else "")
    return _absent(text, "gemini", name, is_known=words is not None)


# -- Methods of torch's `DistributedDataParallel`, `FullyShardedDataParallel` and `fully_shard`, on a `ShardedModel`.


_WHOLE = (
    "weights fetch themselves where they are read; `with gemini.GatheredParameters(model):` holds all of them whole"
)
_FROM_BUDGET = "what stays on the device follows from device_memory= of ShardedModel(...)"
_WINDOW = "`with model.no_sync():` leaves gradients unreduced; the backward outside reduces their sum"
_MEAN = "gradients are sums over the ranks / their number: for a sum / factor, multiply the loss by number / factor"
_NO_HOOK = "gradients travel in reduce_dtype= of ShardedModel(...); a hook of a parameter sees this rank's gradient"
_GROUP = "process_group= of ShardedModel(...) has all collectives, in memory of the model's budget"
_STATES = "ShardedOptimizer.state_dict(), or gemini.save_checkpoint(), which writes each rank's part"

_OF_TORCH = {
    "join": "give every rank equally many batches (DistributedSampler, or drop_last=True), or end all loops alike",
    "register_comm_hook": _NO_HOOK,
    "set_all_reduce_hook": _NO_HOOK,
    "set_custom_all_gather": _NO_HOOK,
    "set_custom_reduce_scatter": _NO_HOOK,
    "summon_full_params": _WHOLE,
    "set_reshard_after_forward": _FROM_BUDGET,
    "set_reshard_after_backward": _FROM_BUDGET,
    "set_unshard_in_backward": _FROM_BUDGET,
    "set_is_last_backward": _WINDOW,
    "set_gradient_divide_factor": _MEAN,
    "set_reduce_scatter_divide_factor": _MEAN,
    "set_force_sum_reduction_for_comms": _MEAN,
    "set_reduce_scatter_unused_params": "parameters without a gradient travel as zeros where another rank has one",
    "set_reduce_scatter_max_input_buffers": _FROM_BUDGET,
    "set_separate_reduce_scatter_group": _GROUP,
    "set_allocate_memory_from_process_group_for_comm": _GROUP,
    "set_symm_mem_for_comm": _GROUP,
    "reset_iter_state": "nothing: a forward after one that failed starts by itself",
    "set_post_optim_event": "nothing: ShardedOptimizer orders its updates and the next forward by itself",
    "clip_grad_norm_": "ShardedOptimizer.clip_grad_norm_(), or torch.nn.utils.clip_grad_norm_(model.parameters(), ...)",
    "set_state_dict_type": "model.state_dict(rank0_only=) is whole, gemini.save_checkpoint() writes each rank's part",
    "state_dict_type": "model.state_dict(rank0_only=) is whole, gemini.save_checkpoint() writes each rank's part",
    "optim_state_dict": _STATES,
    "full_optim_state_dict": _STATES,
    "sharded_optim_state_dict": _STATES,
    "optim_state_dict_to_load": "ShardedOptimizer.load_state_dict() takes a whole state on any number of ranks",
}


def instead_of_torchs(name: str) -> str | None:
    """What to use in place of a method of torch's wrappers; None for a name that none of them has."""
    return _OF_TORCH.get(name)
