"""The keys of DeepSpeed's `zero_optimization`, and what becomes of each here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gemini.engine.config.key import Count, Key, MappedTo, NoEffect, Refused, Section, Whole
from gemini.engine.config.offload import OptimizerOnHostPolicy

Device = Literal["none", "cpu", "nvme"]
Ratio = Annotated[float, Field(ge=0, le=1)]

POLICY = "tensor_placement_policy"
CHUNKS = NoEffect("collectives carry one chunk; its size is searched under the budgets, or fixed by `chunk_size`")
CHECKPOINTS = NoEffect("states are saved by `state_dict()`, whole and for any number of ranks")
_DISK = "there is no disk tier yet; gemini keeps states on the device and the host (cpu)"
# Only `device: nvme` asks for a disk, and is refused. Keys that tune one change nothing without it.
_NO_DISK = NoEffect("only a disk tier would use it, and there is none yet")
_QUANTISED = "collectives that carry quantised values do not exist here; what travels has the dtype of `reduce_dtype`"
_ALWAYS = NoEffect("gradients are reduced chunk by chunk while backward runs")
_PINNED = NoEffect("host memory is page-locked wherever there is a CUDA device")
_FROM_FILE = NoEffect("`load_state_dict` takes whole weights, at any stage and on any number of ranks")
_GATHERED = NoEffect("shards of parameters are gathered by all-gather")

ZERO = [
    Key("zero_optimization.stage", int, MappedTo("stage", note="a missing stage is 0")),
    Key("zero_optimization.contiguous_gradients", bool, NoEffect("gradients are always stored in their chunk")),
    Key("zero_optimization.reduce_scatter", bool, _ALWAYS),
    Key("zero_optimization.reduce_bucket_size", Count, CHUNKS, auto="searched"),
    Key("zero_optimization.use_multi_rank_bucket_allreduce", bool, _ALWAYS),
    Key("zero_optimization.allgather_partitions", bool, NoEffect("shards of parameters are gathered by all-gather")),
    Key("zero_optimization.allgather_bucket_size", Count, CHUNKS, auto="searched"),
    Key(
        "zero_optimization.overlap_comm",
        bool,
        NoEffect(
            "several ranks always reduce the last chunk and gather the next ones while others compute; on one rank "
            "copies between device and host and the computation take turns"
        ),
    ),
    Key("zero_optimization.load_from_fp32_weights", bool, NoEffect("masters are loaded where a state dict has them")),
    Key("zero_optimization.elastic_checkpoint", bool, CHECKPOINTS),
    Key("zero_optimization.sub_group_size", Count, CHUNKS),
    Key("zero_optimization.cpu_offload_use_pin_memory", bool, _PINNED),
    Key(
        "zero_optimization.prefetch_bucket_size",
        Count,
        MappedTo(
            "max_prefetch",
            lambda numel: None if numel else 0,
            "0: nothing is gathered ahead. Any other number of elements: the next chunk is, where no chunk that is "
            "needed earlier has to leave for it",
        ),
        ("stage3_prefetch_bucket_size",),
        auto="the plan decides",
    ),
    Key(
        "zero_optimization.param_persistence_threshold",
        Count,
        MappedTo(
            "param_persistence_threshold",
            note="without it none does; what else stays gathered follows from the budget, `device_memory`",
        ),
        ("stage3_param_persistence_threshold",),
        auto="the memory budget decides",
    ),
    Key(
        "zero_optimization.model_persistence_threshold",
        Count,
        MappedTo("model_persistence_threshold"),
        ("stage3_model_persistence_threshold",),
    ),
    Key(
        "zero_optimization.max_live_parameters",
        Count,
        MappedTo(
            "max_live_parameters",
            note="of parameters in slots, paddings included; without it the budget alone decides, in bytes",
        ),
        ("stage3_max_live_parameters",),
    ),
    Key(
        "zero_optimization.max_reuse_distance",
        Count,
        NoEffect("the chunk whose next use is farthest away leaves first"),
        ("stage3_max_reuse_distance",),
    ),
    Key(
        "zero_optimization.gather_16bit_weights_on_model_save",
        bool,
        NoEffect("`state_dict()` always has whole weights"),
        ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        auto="always gathered",
    ),
    Key(
        "zero_optimization.module_granularity_threshold",
        Count,
        NoEffect("an operator's parameters are fetched together; set_leaf_module joins more"),
        ("stage3_module_granularity_threshold",),
    ),
    Key(
        "zero_optimization.use_all_reduce_for_fetch_params",
        bool,
        _GATHERED,
        ("stage3_use_all_reduce_for_fetch_params",),
    ),
    Key("zero_optimization.allgather_sequential", bool, CHUNKS, ("stage3_allgather_sequential",)),
    Key(
        "zero_optimization.partition_stream_chunk_size",
        Count,
        NoEffect("while a model is built, no rank has more than one operator whole"),
        ("stage3_partition_stream_chunk_size",),
    ),
    Key("zero_optimization.ignore_unused_parameters", bool, MappedTo("ignore_unused_parameters", note="at all stages")),
    Key("zero_optimization.legacy_stage1", bool, NoEffect("there is one stage 1")),
    Key("zero_optimization.round_robin_gradients", bool, NoEffect("each rank moves only its own shard of a gradient")),
    Key(
        "zero_optimization.compute_grad_norm",
        bool,
        NoEffect("every step computes the norm"),
    ),
    Key(
        "zero_optimization.parameter_alignment", bool, NoEffect("every parameter starts at a multiple of 256 elements")
    ),
    Key(
        "zero_optimization.zero_hpz_partition_size",
        Whole,
        Refused("secondary shards inside a group (hpZ) do not exist here", (0, 1)),
    ),
    Key("zero_optimization.zero_quantized_weights", bool, Refused(_QUANTISED)),
    Key("zero_optimization.zero_quantized_nontrainable_weights", bool, Refused(_QUANTISED)),
    Key("zero_optimization.zero_quantized_gradients", bool, Refused(_QUANTISED)),
    Key("zero_optimization.zeropp_loco_param", Section, Refused(_QUANTISED, ({},))),
    Key("zero_optimization.zenflow", Section, Refused("updates that lag behind would change the result", ({},))),
    Key(
        "zero_optimization.mics_shard_size",
        Whole,
        Refused("MiCS divides states inside groups of that many ranks; here all ranks are one group", (-1, 0)),
    ),
    Key(
        "zero_optimization.mics_hierarchical_params_gather",
        bool,
        Refused("MiCS gathers in groups, first inside and then between nodes; here all ranks are one group"),
    ),
    Key("zero_optimization.memory_efficient_linear", bool, NoEffect("backward fetches the weights that it needs")),
    Key("zero_optimization.pipeline_loading_checkpoint", bool, _FROM_FILE),
    Key(
        "zero_optimization.override_module_apply",
        bool,
        NoEffect("Module.apply works while a model is built; rank 0's values win"),
    ),
    Key("zero_optimization.log_trace_cache_warnings", bool, NoEffect("the order of use is recorded at every step")),
    Key("zero_optimization.enable_sanity_checks", bool, NoEffect("ranks always compare what they gather and reduce")),
    Key("zero_optimization.save_muon_momentum_buffer_in_memory", bool, _NO_DISK),
    Key(
        "zero_optimization.leaf_module",
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
            lambda device: OptimizerOnHostPolicy() if device == "cpu" else None,
            "cpu: optimizer state, masters and gradients rest on the host",
            {"nvme": _DISK},
        ),
        auto="the memory budget decides",
    ),
    Key("zero_optimization.offload_optimizer.pin_memory", bool, _PINNED),
    Key(
        "zero_optimization.offload_optimizer.ratio",
        Ratio,
        MappedTo(
            POLICY,
            # `finish` in deepspeed_keys.py joins it with the device, without which it means nothing.
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
    *(
        Key(f"zero_optimization.offload_optimizer.{name}", kind, _NO_DISK, auto="nothing needs it")
        for name, kind in {
            "nvme_path": str,
            "buffer_count": Count,
            "buffer_size": Count,
            "pipeline": bool,
            "pipeline_read": bool,
            "pipeline_write": bool,
            "fast_init": bool,
        }.items()
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
            POLICY, lambda device: "cpu" if device == "cpu" else None, "cpu: all states rest there", {"nvme": _DISK}
        ),
        auto="the memory budget decides",
    ),
    Key("zero_optimization.offload_param.pin_memory", bool, _PINNED),
    *(
        Key(f"zero_optimization.offload_param.{name}", kind, _NO_DISK, auto="nothing needs it")
        for name, kind in {"nvme_path": str, "buffer_count": Count, "buffer_size": Count, "max_in_cpu": Count}.items()
    ),
    *(
        Key(f"aio.{name}", Any, _NO_DISK)
        for name in ("block_size", "queue_depth", "thread_count", "single_submit", "overlap_events", "use_gds")
    ),
]
