"""Every key of DeepSpeed's documented config classes, and what becomes of it here.

The order matters where two keys are one field: the later row counts. docs/config.md prints this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from gemini.engine.config.key import (
    CHUNKS,
    OTHER_PARALLELISM,
    PINNED,
    Count,
    Effect,
    Key,
    MappedTo,
    NoEffect,
    Number,
    Refused,
    Section,
    Table,
    Translation,
    Whole,
    dtype_named,
    none_if_zero,
)
from gemini.engine.config.read import Problem
from gemini.placement.policies import OptimizerOnHostPolicy

# -- The keys of DeepSpeed's `zero_optimization`, and what becomes of each here.


Device = Literal["none", "cpu", "nvme"]
Ratio = Annotated[float, Field(ge=0, le=1)]

POLICY = "tensor_placement_policy"
CHECKPOINTS = NoEffect("a checkpoint is loaded on any number of ranks, at any stage")
_OPTIMIZER_OFFLOAD, _PARAM_OFFLOAD = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_WEIGHTS = NoEffect("the budgets decide: weights rest on the disk where the host has no room for them")
_RING = NoEffect("three chunks are on their way at once: one is read, one updated, one written")
_REQUESTS = NoEffect("four threads read and write 4 MiB at a time, past the page cache")
_LOCO = "what quantising gradients loses is not added to the next ones here; it has a bound, see `quantized_gradients`"
_ALWAYS = NoEffect("gradients are reduced chunk by chunk while backward runs")
_FROM_FILE = NoEffect("each rank reads its own part of a checkpoint, and none the whole")
_GATHERED = NoEffect("shards of parameters are gathered by all-gather")


def _group_of(size: int) -> int | None:
    return None if size in (-1, 0) else size


def _bits(number: int) -> Callable[[bool], int | None]:
    return lambda on: number if on else None


def _zero(name: str, values: Any, effect: Effect, spellings: tuple[str, ...] = (), auto: str = "") -> Key:
    return Key(f"zero_optimization.{name}", values, effect, spellings, auto)


def _zero3(name: str, values: Any, effect: Effect, spellings: tuple[str, ...] = (), auto: str = "") -> Key:
    """A key whose name also begins with "stage3_" in configs."""
    return _zero(name, values, effect, (f"stage3_{name}", *spellings), auto)


ZERO = [
    _zero("stage", int, MappedTo("stage", note="a missing stage is 0")),
    _zero("contiguous_gradients", bool, NoEffect("gradients are always stored in their chunk")),
    _zero("reduce_scatter", bool, _ALWAYS),
    _zero("reduce_bucket_size", Count, CHUNKS, auto="searched"),
    _zero("use_multi_rank_bucket_allreduce", bool, _ALWAYS),
    _zero("allgather_partitions", bool, _GATHERED),
    _zero("allgather_bucket_size", Count, CHUNKS, auto="searched"),
    _zero(
        "overlap_comm",
        bool,
        NoEffect(
            "the last chunk is always reduced, and the next ones gathered or copied from the host, while others compute"
        ),
    ),
    _zero("load_from_fp32_weights", bool, MappedTo("load_from_fp32_weights")),
    _zero("elastic_checkpoint", bool, CHECKPOINTS),
    _zero("sub_group_size", Count, CHUNKS),
    _zero("cpu_offload_use_pin_memory", bool, PINNED),
    _zero3(
        "prefetch_bucket_size",
        Count,
        MappedTo(
            "max_prefetch",
            lambda numel: None if numel else 0,
            "0: nothing is fetched ahead. Any other number of elements: the next chunk is, where no chunk that is "
            "needed earlier has to leave for it",
        ),
        auto="the plan decides",
    ),
    _zero3(
        "param_persistence_threshold",
        Count,
        MappedTo(
            "param_persistence_threshold",
            note="without it none does; what else stays gathered follows from the budget, `device_memory`",
        ),
        auto="the memory budget decides",
    ),
    _zero3("model_persistence_threshold", Count, MappedTo("model_persistence_threshold")),
    _zero3(
        "max_live_parameters",
        Count,
        MappedTo(
            "max_live_parameters",
            note="of parameters in slots, paddings included; without it the budget alone decides, in bytes",
        ),
    ),
    _zero3("max_reuse_distance", Count, NoEffect("the chunk whose next use is farthest away leaves first")),
    _zero3(
        "gather_16bit_weights_on_model_save",
        bool,
        NoEffect("`state_dict()` always has whole weights"),
        spellings=("stage3_gather_fp16_weights_on_model_save",),
        auto="always gathered",
    ),
    _zero3(
        "module_granularity_threshold",
        Count,
        NoEffect("an operator's parameters are fetched together; set_leaf_module joins more"),
    ),
    _zero3("use_all_reduce_for_fetch_params", bool, _GATHERED),
    _zero3("allgather_sequential", bool, CHUNKS),
    _zero3(
        "partition_stream_chunk_size",
        Count,
        NoEffect("while a model is built, no rank has more than one operator whole"),
    ),
    _zero("ignore_unused_parameters", bool, MappedTo("ignore_unused_parameters", note="at all stages")),
    _zero("legacy_stage1", bool, NoEffect("there is one stage 1")),
    _zero("round_robin_gradients", bool, NoEffect("each rank moves only its own shard of a gradient")),
    _zero("compute_grad_norm", bool, NoEffect("every step computes the norm")),
    _zero("parameter_alignment", bool, NoEffect("every parameter starts at a multiple of 256 elements")),
    _zero(
        "zero_hpz_partition_size",
        Whole,
        MappedTo(
            "secondary_group_size",
            by=lambda size: None if size in (0, 1) else size,
            note="consecutive ranks; `0` and `1`: there are no secondary shards",
        ),
    ),
    _zero(
        "zero_quantized_weights",
        bool,
        MappedTo("quantized_weights", by=_bits(8), note="true: 8 bits, in blocks of 256 elements, at stage 3"),
    ),
    _zero(
        "zero_quantized_nontrainable_weights",
        bool,
        MappedTo("quantized_frozen_weights", by=_bits(8), note="true: 8 bits where they travel; they rest as they are"),
    ),
    _zero(
        "zero_quantized_gradients",
        bool,
        MappedTo("quantized_gradients", by=_bits(4), note="true: 4 bits, at every stage, of one-dimensional ones too"),
    ),
    _zero("zeropp_loco_param", Section, Refused(_LOCO, ({},))),
    _zero("zenflow", Section, Refused("updates that lag behind would change the result", ({},))),
    _zero(
        "mics_shard_size",
        Whole,
        MappedTo("shard_group_size", by=_group_of, note="consecutive ranks; `-1` and `0`: all ranks are one group"),
    ),
    _zero(
        "mics_hierarchical_params_gather",
        bool,
        NoEffect("parameters are gathered inside a group by one launch; give a group no more ranks than a node has"),
    ),
    _zero("memory_efficient_linear", bool, NoEffect("backward fetches the weights that it needs")),
    _zero("pipeline_loading_checkpoint", bool, _FROM_FILE),
    _zero("override_module_apply", bool, NoEffect("Module.apply works while a model is built; rank 0's values win")),
    _zero("log_trace_cache_warnings", bool, NoEffect("the order of use is recorded at every step")),
    _zero("enable_sanity_checks", bool, NoEffect("ranks always compare what they gather and reduce")),
    _zero("save_muon_momentum_buffer_in_memory", bool, NoEffect("it rests as all states do")),
    _zero(
        "leaf_module",
        Section,
        Refused("name leaf modules by gemini.set_leaf_module(model, classes) before wrapping", ({},)),
    ),
    Key("zero_optimization", bool, MappedTo("stage", int, "old form: true is stage 1")),
    Key("allgather_size", Count, CHUNKS),
]

OFFLOAD = [
    Key(
        "zero_optimization.cpu_offload",
        bool,
        MappedTo(POLICY, lambda on: OptimizerOnHostPolicy() if on else None, "old name of offload_optimizer"),
    ),
    Key(
        "zero_optimization.offload_optimizer.device",
        Device,
        MappedTo(
            POLICY,
            # `finish` adds what nvme means beside.
            lambda device: None if device == "none" else OptimizerOnHostPolicy(),
            "cpu: optimizer state, masters and gradients rest on the host; nvme: optimizer state and masters on the "
            "disk (`disk_optim_frac` is 1), gradients on the host",
        ),
        auto="the memory budget decides",
    ),
    Key("zero_optimization.offload_optimizer.pin_memory", bool, PINNED),
    Key(
        "zero_optimization.offload_optimizer.ratio",
        Ratio,
        MappedTo(
            POLICY,
            # `finish` joins it with the device, without which it means nothing.
            lambda ratio: None,
            "with device cpu: the fraction of the state that rests on the host, from the last chunk on. It is updated "
            "there, and the rest on the device",
        ),
    ),
    Key("zero_optimization.offload_optimizer.super_offload", bool, NoEffect("updates on the host use all cores")),
    Key("zero_optimization.offload_optimizer.convert_grad_on_cpu", bool, NoEffect("kernels read 16-bit gradients")),
    Key(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        Ratio,
        NoEffect("`optim.set_num_threads` sets the number of threads"),
    ),
    Key(
        f"{_OPTIMIZER_OFFLOAD}.nvme_path",
        str,
        MappedTo("disk_path", note="with device nvme: the folder, which must be there; its files have no names"),
    ),
    *(
        Key(f"{_OPTIMIZER_OFFLOAD}.{name}", kind, _RING, auto="nothing needs it")
        for name, kind in {
            "buffer_count": Count,
            "buffer_size": Count,
            "pipeline": bool,
            "pipeline_read": bool,
            "pipeline_write": bool,
        }.items()
    ),
    Key(
        f"{_OPTIMIZER_OFFLOAD}.fast_init",
        bool,
        NoEffect("the disk's bytes are reserved and read as zeros without being written"),
        auto="nothing needs it",
    ),
    # These rows come after those of the optimizer: with both, all states rest on the host, as "cpu" has it.
    Key(
        "zero_optimization.cpu_offload_param",
        bool,
        MappedTo(POLICY, lambda on: "cpu" if on else None, "old name of offload_param"),
        spellings=("cpu_offload_params",),
    ),
    Key(
        "zero_optimization.offload_param.device",
        Device,
        MappedTo(
            POLICY,
            lambda device: None if device == "none" else "cpu",
            "cpu: all states rest on the host, but for those that offload_optimizer puts onto the disk; nvme: so do "
            "those for which the host has no room, weights last",
        ),
        auto="the memory budget decides",
    ),
    Key("zero_optimization.offload_param.pin_memory", bool, PINNED),
    Key(
        f"{_PARAM_OFFLOAD}.nvme_path",
        str,
        MappedTo("disk_path", note="with device nvme; where offload_optimizer names a folder, too, that one counts"),
    ),
    *(
        Key(f"{_PARAM_OFFLOAD}.{name}", Count, _WEIGHTS, auto="nothing needs it")
        for name in ("buffer_count", "buffer_size", "max_in_cpu")
    ),
    *(
        Key(f"aio.{name}", Any, _REQUESTS)
        for name in ("block_size", "queue_depth", "thread_count", "single_submit", "overlap_events", "use_gds")
    ),
]


DtypeName = Literal["fp32", "fp16", "bfp16", "bf16"]

_MEAN = NoEffect("the mean over ranks is made in fp32, after the sum")
_PROFILERS = NoEffect("torch.profiler shows each fetch, reduction and update by name; an Observer counts every move")
_ACTIVATIONS = NoEffect("activations are checkpointed where the model calls torch.utils.checkpoint, and stay there")
_TENSOR_PARALLEL = (
    "torch's parallelize_module(model, mesh['tp'], plan) divides the tensors, and initialize(device_mesh=mesh['dp']) "
    "shards the rest; a plan is a model's, of which a config knows nothing: docs/parallelism.md"
)
_SEQUENCE_PARALLEL = (
    "leave it out: ranks with other tokens of a sequence share shards like those with other sequences. Gradients are "
    "means over all of them, where DeepSpeed has sums over a sequence's ranks: multiply the loss by their number. Give "
    "batch sizes as if each rank had sequences of its own: docs/parallelism.md"
)


# Configs carry sections of features that they switch off. These ask for nothing, so they are not refused.
def _is_off(section: Any) -> bool:
    return not section or (isinstance(section, dict) and not section.get("enabled", False))


def _each(section: str, names: str, effect: NoEffect) -> list[Key]:
    """Keys of one section with one effect."""
    return [Key(f"{section}.{name}", Any, effect, auto="nothing needs it") for name in names.split()]


def _static_scale(scale: float) -> dict[str, float] | None:
    """0 is DeepSpeed's word for a dynamic scale."""
    return {"initial_scale": scale, "min_scale": scale, "max_scale": scale} if scale else None


def _monitor(renamed: Mapping[str, str]) -> Callable[[Any], dict[str, Any] | None]:
    """What a library's function takes of a section; None where it is off. renamed: names that are the library's own."""
    # Comet's interval is of DeepSpeed's own writer, and every optimizer step is written here.
    ours = ("enabled", "samples_log_interval")

    def options(section: Any) -> dict[str, Any] | None:
        if _is_off(section):
            return None
        return {
            renamed.get(name, name): value for name, value in section.items() if name not in ours and value is not None
        }

    return options


def _autocast(section: Any) -> torch.dtype | None:
    """DeepSpeed's dtype is bfloat16 where none is said."""
    return None if _is_off(section) else dtype_named(section.get("dtype") or "bfloat16")


_BATCHES = [
    Key("train_batch_size", Count, MappedTo("train_batch_size"), auto="follows from the other two"),
    Key(
        "train_micro_batch_size_per_gpu",
        Count,
        MappedTo("train_micro_batch_size_per_gpu"),
        auto="follows from the other two, else from the loader",
    ),
    Key(
        "gradient_accumulation_steps",
        Count,
        MappedTo("gradient_accumulation_steps"),
        auto="follows from the other two, else 1",
    ),
    Key("gradient_clipping", Number, MappedTo("clip_grad_norm", none_if_zero), auto="no clipping"),
    Key("dataloader_drop_last", bool, MappedTo("drop_last")),
    Key("steps_per_print", Count, MappedTo("steps_per_print", none_if_zero)),
]

_OPTIMIZER = [
    Key("optimizer.type", str, MappedTo("optimizer.type", note="Adam and AdamW are `HybridAdam`")),
    Key("optimizer.legacy_fusion", bool, NoEffect("each chunk is updated by one kernel")),
    Key("optimizer.params.adam_w_mode", bool, MappedTo("optimizer.params.adamw_mode")),
    Key("optimizer.params.torch_adam", bool, NoEffect("Adam has one order of operations on every device")),
    Key("optimizer.params.fused", bool, NoEffect("each chunk is updated by one kernel")),
    Key("optimizer.params.amsgrad", bool, Refused("HybridAdam keeps two moments; torch's own Adam has amsgrad")),
    Key("optimizer.params.max_grad_norm", Number, Refused("write gradient_clipping instead", (0,))),
    Key("optimizer.params.ns_method", str, NoEffect("Muon is torch's, which has the standard iteration")),
    Key("optimizer.params.per_head_muon", bool, Refused("Muon takes each matrix as it is")),
    Key("optimizer.params.*", Any, MappedTo("optimizer.params.*"), auto="the optimizer's default"),
    Key(
        "scheduler.type",
        str,
        MappedTo("scheduler.type", note="one of DeepSpeed's five, or of torch.optim.lr_scheduler"),
    ),
    Key("scheduler.params.*", Any, MappedTo("scheduler.params.*"), auto="the schedule's default"),
    Key(
        "zero_allow_untested_optimizer",
        bool,
        NoEffect("an optimizer that is not known is refused, unless `elementwise=True` or `per_tensor` says how"),
    ),
    Key("zero_force_ds_cpu_optimizer", bool, NoEffect("the update runs where its state rests, with the same bits")),
]

_PRECISION = [
    Key("fp16.enabled", bool, MappedTo("dtype", lambda on: torch.float16 if on else None), auto="off"),
    Key("fp16.auto_cast", bool, MappedTo("cast_inputs")),
    Key(
        "fp16.initial_scale_power",
        Annotated[Count, Field(le=64)],
        MappedTo("loss_scale.initial_scale", lambda power: 2.0**power, "2 to the power of it"),
        auto="16",
    ),
    Key("fp16.loss_scale_window", Count, MappedTo("loss_scale.growth_interval"), auto="1000"),
    Key("fp16.hysteresis", Count, MappedTo("loss_scale.hysteresis"), auto="2"),
    Key("fp16.min_loss_scale", Number, MappedTo("loss_scale.min_scale"), auto="1"),
    # This row comes after those of the dynamic scale, whose values a static scale replaces.
    Key(
        "fp16.loss_scale",
        Number,
        MappedTo("loss_scale", _static_scale, "0: dynamic; else initial, least and largest scale are this one"),
        auto="dynamic",
    ),
    Key("fp16.consecutive_hysteresis", bool, NoEffect("`hysteresis` is given back only when the scale grows")),
    Key("fp16.fused_mode", bool, NoEffect("each chunk is updated by one kernel")),
    Key("fp16.fp16_master_weights_and_grads", bool, Refused("masters of 16-bit weights are fp32")),
    Key("bfloat16.enabled", bool, MappedTo("dtype", lambda on: torch.bfloat16 if on else None, "old name of bf16")),
    Key("bf16.enabled", bool, MappedTo("dtype", lambda on: torch.bfloat16 if on else None), auto="off"),
    Key("bf16.immediate_grad_update", bool, NoEffect("gradients reach their chunk the moment backward makes them")),
    Key("bf16.check_grad_overflow", bool, NoEffect("every step looks for non-finite gradients")),
    Key("bf16.bf16_master_weights_and_grads", bool, Refused("bf16 weights have masters of 32 bits, split in two")),
    Key(
        "bf16.bf16_optimizer_states",
        bool,
        MappedTo("optimizer.params.state_dtype", lambda on: "bf16" if on else None, "moments of 16 bits"),
    ),
    Key("amp", Section, Refused("Apex is not used: write bf16 or fp16", _is_off)),
    Key(
        "torch_autocast",
        Section,
        MappedTo(
            "autocast", _autocast, "the engine's forward runs under `torch.autocast`; torch's own list of functions"
        ),
    ),
    Key("communication_data_type", DtypeName, MappedTo("reduce_dtype")),
    Key("fp32_allreduce", bool, MappedTo("reduce_dtype", lambda on: torch.float32 if on else None)),
    Key("data_types.grad_accum_dtype", DtypeName, MappedTo("accumulate_dtype")),
    Key("data_types.param_dtype", DtypeName, MappedTo("dtype")),
    Key("data_types.buffer_dtype", str, Refused("buffers keep their dtypes", ())),
    Key("seq_parallel_comm_data_type", str, NoEffect("there is no sequence parallelism of gemini's own")),
]

_COMMUNICATION = [
    Key("prescale_gradients", bool, _MEAN),
    Key("gradient_predivide_factor", Number, _MEAN),
    Key(
        "gradient_allreduce_op",
        Literal["mean", "sum"],
        Refused("gradients are the mean over ranks; multiply the loss by the number of ranks for the sum", ("mean",)),
    ),
    Key("sparse_gradients", bool, NoEffect("gradients of embeddings travel whole")),
    Key("disable_allgather", bool, Refused("parameters that ranks share must be gathered to be used")),
]

_MONITORS = [
    Key("tensorboard.enabled", bool, MappedTo("monitors.tensorboard", lambda on: {} if on else None)),
    Key("tensorboard.output_path", str, MappedTo("monitors.tensorboard.output_path")),
    Key("tensorboard.job_name", str, MappedTo("monitors.tensorboard.job_name")),
    Key("csv_monitor.enabled", bool, MappedTo("monitors.json_lines", lambda on: {} if on else None)),
    Key("csv_monitor.output_path", str, MappedTo("monitors.json_lines.output_path", note="JSON lines in place of CSV")),
    Key("csv_monitor.job_name", str, MappedTo("monitors.json_lines.job_name")),
    *(
        Key(name, Section, MappedTo(f"monitors.{name}", _monitor(renamed), note))
        for name, renamed, note in (
            ("wandb", {"team": "entity"}, "project, group and team go to `wandb.init`, as do other keys"),
            ("comet", {"project": "project_name"}, "project and workspace go to `comet_ml.start`, as do other keys"),
            ("trackio", {"team": "space_id"}, "project and other keys go to `trackio.init`"),
            ("mlflow", {}, "experiment_name, tracking_uri and arguments of `mlflow.start_run`"),
        )
    ),
    *_each("flops_profiler", "enabled profile_step module_depth top_modules detailed output_file", _PROFILERS),
    Key("flops_profiler.recompute_fwd_factor", Number, _PROFILERS),
    *_each("comms_logger", "enabled verbose prof_all prof_ops debug", _PROFILERS),
    Key("timers", Section, _PROFILERS),
    Key("wall_clock_breakdown", bool, _PROFILERS),
    Key("memory_breakdown", bool, NoEffect("`model.memory_report()` says what lies where")),
    Key("dump_state", bool, NoEffect("the engine prints what it decided when it starts")),
    Key("log_level", str, NoEffect("the logger of `get_dist_logger` has its own level")),
    *_each(
        "activation_checkpointing",
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile",
        _ACTIVATIONS,
    ),
    *_each("checkpoint", "tag_validation load_universal use_node_local_storage parallel_write writer", CHECKPOINTS),
]

_NOT_HERE = [
    Key("autotuning", Section, Refused("there is no tuner; `gemini.estimate_memory` says what fits", _is_off)),
    Key("elasticity", Section, Refused("the number of ranks is fixed while a script runs", _is_off)),
    Key("hybrid_engine", Section, Refused("there are no inference kernels; model.generate works sharded", _is_off)),
    Key("expert_parallel", Section, Refused(OTHER_PARALLELISM, _is_off)),
    Key(
        "tensor_parallel",
        Section,
        Refused(_TENSOR_PARALLEL, lambda section: section.get("autotp_size", 0) in (0, 1)),
    ),
    Key("sequence_parallel_size", Count, Refused(_SEQUENCE_PARALLEL, (0, 1))),
    Key("pipeline", Section, Refused(OTHER_PARALLELISM, ({},))),
    Key("use_data_before_expert_parallelism", bool, Refused(OTHER_PARALLELISM)),
    Key("sparse_attention", Section, Refused("the model computes its own attention", ({},))),
    Key("curriculum_learning", Section, Refused("the loader decides the order of the data", _is_off)),
    Key("data_efficiency", Section, Refused("the loader decides the order of the data", _is_off)),
    Key("progressive_layer_drop", Section, Refused("the model decides which layers run", _is_off)),
    Key("eigenvalue", Section, Refused("eigenvalues of blocks are not computed", _is_off)),
    Key("quantize_training", Section, Refused("weights are not quantised while they train", _is_off)),
    Key("compression_training", Section, Refused("weights are not compressed while they train", ({},))),
    Key("weight_quantization", Section, Refused("weights are not quantised", ({},))),
    Key("nebula", Section, Refused("states are saved by `state_dict()`", _is_off)),
    Key("datastates_ckpt", Section, Refused("states are saved by `state_dict()`", _is_off)),
    Key("compile.deepcompile", bool, Refused("use torch.compile(model), before or after wrapping")),
    *_each("compile", "enabled backend kwargs", NoEffect("use torch.compile(model), before or after wrapping")),
    Key("graph_harvesting", bool, NoEffect("no CUDA graphs are captured")),
    Key("vocabulary_size", Count, NoEffect("DeepSpeed only warns of sizes that are no multiples of 8")),
    Key("managed_gradient_accumulation", bool, Refused("the engine counts micro-batches", (True,))),
]


def finish(data: Mapping[str, Any], found: Translation) -> None:
    """Apply DeepSpeed's own defaults where they differ from ours, and what keys say only together."""
    fields, origins = found.fields, found.origins

    def is_on(section: str) -> bool:
        return found.given.get(f"{section}.enabled") is True

    # DeepSpeed's default is stage 0, and that of `Config` is 3.
    stage = fields.setdefault("stage", 0)
    if is_on("fp16") and (is_on("bf16") or is_on("bfloat16")):
        found.problems.append(Problem(("fp16", "enabled"), "and bf16.enabled are both true: choose one"))
    policy = fields.get(POLICY)
    ratio = found.given.get(f"{_OPTIMIZER_OFFLOAD}.ratio", 1.0)
    device = found.given.get(f"{_OPTIMIZER_OFFLOAD}.device", "none")
    fields.pop("disk_path", None)  # of whichever row came last
    for section in (_PARAM_OFFLOAD, _OPTIMIZER_OFFLOAD):
        folder = found.given.get(f"{section}.nvme_path")
        if found.given.get(f"{section}.device") != "nvme":
            if folder is not None:
                found.ignored.append((f"{section}.nvme_path", "nothing is put onto a disk without device nvme"))
        elif folder is None:
            path = tuple(f"{section}.device".split("."))
            found.problems.append(Problem(path, "='nvme' needs nvme_path beside it, a folder on a local disk"))
        else:
            fields["disk_path"] = folder
    if device == "nvme":
        fields["disk_optim_frac"] = 1.0
    if device == "none":
        # A ratio of 1 is DeepSpeed's default, and asks for nothing.
        if ratio < 1:
            found.ignored.append(("zero_optimization.offload_optimizer.ratio", "nothing is offloaded without a device"))
    elif ratio < 1 and policy is not None:
        # The row of `offload_param` comes later in the table, so `policy` is "cpu" where both offloads are asked for.
        fields[POLICY] = OptimizerOnHostPolicy(ratio, offloads_params=policy == "cpu")
    if policy is not None and stage == 0:
        found.problems.append(
            Problem(origins[(POLICY,)], "asks for offload at stage 0: set zero_optimization.stage to 1, 2 or 3")
        )
    elif policy == "cpu" and stage in (1, 2):
        found.problems.append(
            Problem(origins[(POLICY,)], f"offloads parameters, which needs zero_optimization.stage 3, found {stage}")
        )
    if isinstance(fields.get("optimizer"), dict):
        _adam(fields["optimizer"])
    for section, monitor in (("tensorboard", "tensorboard"), ("csv_monitor", "json_lines")):
        # A path alone writes nothing: a config may keep the section of a monitor that is off.
        if not is_on(section):
            fields.get("monitors", {}).pop(monitor, None)


def _adam(optimizer: dict[str, Any]) -> None:
    """DeepSpeed's "Adam" is AdamW unless `adam_w_mode` says otherwise, and its "AdamW" is that in any case."""
    name = str(optimizer.get("type")).lower()
    if name in ("adam", "adamw"):
        optimizer["type"] = "HybridAdam"
    if name == "adamw":
        optimizer.get("params", {}).pop("adamw_mode", None)


TABLE = Table(
    [*_BATCHES, *_OPTIMIZER, *_PRECISION, *_COMMUNICATION, *ZERO, *OFFLOAD, *_MONITORS, *_NOT_HERE],
    "zero_optimization",
    finish,
    placeholder="auto",
)
