"""The keys of Colossal-AI's config files, and what becomes of each here.

`model_config` and `optimizer_config` of `zero` are arguments of its ShardedModelV2 and ShardedOptimizerV2, `plugin` has
those of its GeminiPlugin; the rest stands at the top of the file. docs/config.md prints this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

import torch

from gemini.engine.config.key import (
    CHUNKS,
    OTHER_PARALLELISM,
    PINNED,
    Count,
    Key,
    MappedTo,
    NoEffect,
    Number,
    Refused,
    Table,
    Translation,
    Whole,
    dtype_named,
    none_if_zero,
)
from gemini.engine.config.read import Problem
from gemini.placement.policies import FRACTIONS, MARGIN


class AMP_TYPE(Enum):
    """The kinds of mixed precision that a Colossal-AI config names in `fp16=dict(mode=...)`."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


_MODEL, _OPTIMIZER, _PLUGIN = "zero.model_config", "zero.optimizer_config", "plugin"
_GROUP = Refused("give the group to ShardedModel(process_group=...): a config has no process groups", ())
_NO_GROUP = NoEffect("gradients and norms are reduced over the model's own group")
_BUDGET = NoEffect("the plan spends all of `device_memory`, on what saves most bytes over the link")
_SKIPPED = NoEffect("skipped steps are in `optimizer.last_step`")
_STATISTICS = NoEffect("live statistics are read at every plan")
_ONE_WAY = NoEffect("the engine averages gradients over ranks by itself")


# Any mode is fp16 here. `finish` refuses what is no mode.
def _mode(mode: Any) -> torch.dtype | None:
    return None if mode is None else torch.float16


# A size may be written as a number, or with its kind: `parallel = dict(tensor=dict(size=1, mode="1d"))`.
def _is_one(value: Any) -> bool:
    return (value.get("size", 1) if isinstance(value, Mapping) else value) in (None, 1)


# These arguments of the loss scaler stand at three places: in `plugin`, in `zero.optimizer_config` and in `fp16`.
_SCALER = {
    "initial_scale": Number,
    "min_scale": Number,
    "growth_factor": Number,
    "backoff_factor": Number,
    "growth_interval": Whole,
    "hysteresis": Whole,
    "max_scale": Number,
}

_PLUGIN_KEYS = [
    Key(f"{_PLUGIN}.placement_policy", Any, MappedTo("tensor_placement_policy", note='without it "static", as there')),
    *(Key(f"{_PLUGIN}.{name}", Number, MappedTo(name)) for name in FRACTIONS),
    Key(f"{_PLUGIN}.{MARGIN}", Number, MappedTo(MARGIN)),
    Key(
        f"{_PLUGIN}.precision",
        Literal["fp16", "bf16", "fp32"],
        MappedTo("dtype", dtype_named, "without it weights are fp16, as there"),
    ),
    Key(f"{_PLUGIN}.master_weights", bool, Refused("16-bit weights have fp32 masters", (True,))),
    *(Key(f"{_PLUGIN}.{name}", kind, MappedTo(f"loss_scale.{name}")) for name, kind in _SCALER.items()),
    Key(f"{_PLUGIN}.max_norm", Number, MappedTo("clip_grad_norm", none_if_zero, "0: no clipping")),
    Key(f"{_PLUGIN}.norm_type", Number, Refused("configs clip by the 2-norm; clip_grad_norm_() has inf, too", (2.0,))),
    Key(f"{_PLUGIN}.enable_gradient_accumulation", bool, NoEffect("micro-batches are added up in any case")),
    Key(f"{_PLUGIN}.max_prefetch", Count, MappedTo("max_prefetch", note="results do not change")),
    Key(f"{_PLUGIN}.warmup_non_model_data_ratio", Number, _BUDGET),
    Key(f"{_PLUGIN}.steady_cuda_cap_ratio", Number, _BUDGET),
    *(
        Key(f"{_PLUGIN}.{name}", Any, CHUNKS)
        for name in ("chunk_config_dict", "search_range_m", "hidden_dim", "min_chunk_size_m")
    ),
    Key(f"{_PLUGIN}.chunk_init_device", Any, NoEffect("chunks are made where the plan wants them")),
    Key(f"{_PLUGIN}.memstats", Any, _STATISTICS),
    Key(f"{_PLUGIN}.pin_memory", bool, PINNED),
    Key(f"{_PLUGIN}.force_outputs_fp32", bool, Refused("cast the outputs in the script")),
    Key(f"{_PLUGIN}.strict_ddp_mode", bool, NoEffect("every parameter is averaged over the ranks")),
    Key(f"{_PLUGIN}.verbose", bool, _SKIPPED),
    *(Key(f"{_PLUGIN}.{name}", Count, Refused(OTHER_PARALLELISM, (1,))) for name in ("tp_size", "extra_dp_size")),
]

_KEYS = [
    Key(f"{_MODEL}.shard_strategy", Any, MappedTo("shard_strategy")),
    Key(f"{_MODEL}.tensor_placement_policy", Any, MappedTo("tensor_placement_policy"), spellings=("placement_policy",)),
    *(Key(f"{_MODEL}.{name}", Number, MappedTo(name)) for name in FRACTIONS),
    Key(f"{_MODEL}.reuse_fp16_shard", bool, MappedTo("reuse_fp16_shard")),
    Key(
        f"{_MODEL}.bf16",
        bool,
        MappedTo("dtype", lambda on: torch.bfloat16 if on else None, "without it weights are fp16, as there"),
    ),
    Key(
        f"{_MODEL}.fp32_reduce_scatter",
        bool,
        MappedTo("reduce_dtype", lambda on: torch.float32 if on else None, "True: fp32"),
    ),
    Key(f"{_MODEL}.reduce_scatter_bucket_size_mb", Number, CHUNKS),
    Key(f"{_MODEL}.gradient_predivide_factor", Number, NoEffect("the mean is made in fp32, after the sum over ranks")),
    Key(f"{_MODEL}.warmup_non_model_data_ratio", Number, _BUDGET),
    Key(f"{_MODEL}.use_memory_tracer", bool, _STATISTICS),
    Key(f"{_MODEL}.reshard_after_forward", bool, NoEffect("what is released follows from the budget")),
    Key(f"{_MODEL}.process_group", Any, _GROUP),
    Key(f"{_MODEL}.reduce_scatter_process_group", Any, _GROUP),
    *(Key(f"{_OPTIMIZER}.{name}", kind, MappedTo(f"loss_scale.{name}")) for name, kind in _SCALER.items()),
    Key(f"{_OPTIMIZER}.{MARGIN}", Number, MappedTo(MARGIN)),
    Key(f"{_OPTIMIZER}.cpu_offload", bool, NoEffect("`tensor_placement_policy` says where optimizer state rests")),
    Key(f"{_OPTIMIZER}.keep_unsharded", bool, _BUDGET),
    Key(f"{_OPTIMIZER}.verbose", bool, _SKIPPED),
    Key(f"{_OPTIMIZER}.dp_process_group", Any, _NO_GROUP),
    Key(f"{_OPTIMIZER}.mp_process_group", Any, _NO_GROUP),
    Key(
        "fp16.mode",
        Any,
        MappedTo("dtype", _mode, "weights are fp16 with fp32 masters, as in AMP_TYPE.NAIVE, whatever the mode"),
    ),
    *(Key(f"fp16.{name}", kind, MappedTo(f"loss_scale.{name}")) for name, kind in _SCALER.items()),
    Key("fp16.init_scale", Number, MappedTo("loss_scale.initial_scale", note="torch's name")),
    Key("fp16.enabled", bool, Refused("leave fp16 out instead", (True,))),
    Key("fp16.opt_level", str, NoEffect("Apex is not used")),
    Key("fp16.log_num_zeros_in_grad", bool, NoEffect("zeros in gradients are not counted")),
    Key("fp16.verbose", bool, _SKIPPED),
    Key("clip_grad_norm", Number, MappedTo("clip_grad_norm", none_if_zero, "0: no clipping")),
    Key("gradient_accumulation", Count, MappedTo("gradient_accumulation_steps")),
    Key("gradient_handler", Any, _ONE_WAY),
    Key("torch_ddp", Any, _ONE_WAY),
    Key("cudnn_benchmark", bool, NoEffect("set torch.backends.cudnn.benchmark in the script")),
    Key("cudnn_deterministic", bool, NoEffect("set torch.backends.cudnn.deterministic in the script")),
    Key("seed", Whole, NoEffect("launch_from_torch(seed=...) seeds")),
    Key("parallel.data", Any, NoEffect("every rank of the model's group")),
    Key("parallel.pipeline", Any, Refused(OTHER_PARALLELISM, _is_one)),
    Key("parallel.tensor", Any, Refused(OTHER_PARALLELISM, _is_one)),
    Key("optimizer.type", str, MappedTo("optimizer.type")),
    Key("optimizer.params.*", Any, MappedTo("optimizer.params.*")),
    Key("scheduler.type", str, MappedTo("scheduler.type")),
    Key("scheduler.params.*", Any, MappedTo("scheduler.params.*")),
    Key("dtype", Any, MappedTo("dtype", note="gemini's own field, where neither fp16 nor bf16 is meant")),
    *_PLUGIN_KEYS,
]


def finish(data: Mapping[str, Any], found: Translation) -> None:
    """Without `zero` a Colossal-AI model is replicated; with it, weights are fp16 unless something else is said.

    A model with 16-bit weights casts its inputs to their dtype, as Colossal-AI's does: its loops give fp32 batches.
    """
    if "zero" in data and _PLUGIN in data:
        found.problems.append(Problem((_PLUGIN,), "and zero are both there: leave one out"))
    if _PLUGIN in data:
        # These are the defaults of GeminiPlugin.
        found.fields.setdefault("tensor_placement_policy", "static")
        found.fields.setdefault("dtype", torch.float16)
    elif "zero" not in data:
        found.fields.setdefault("stage", 0)
    elif "fp16" in data:
        found.problems.append(
            Problem(("fp16",), "and zero are both there: zero makes the weights fp16 already, so leave fp16 out")
        )
    else:
        found.fields.setdefault("dtype", torch.float16)
    if found.fields.get("tensor_placement_policy", "auto") != "auto" and MARGIN in found.fields:
        key = ".".join(found.origins[(MARGIN,)])
        found.ignored.append((key, 'only "auto" looks for room beside parameters, as there'))
        # `Settings` refuses the fraction with any policy but "auto"; Colossal-AI ignores it there.
        del found.fields[MARGIN]
    if found.fields.get("dtype") in (torch.float16, torch.bfloat16):
        found.fields.setdefault("cast_inputs", True)
    mode = data.get("fp16", {}).get("mode") if isinstance(data.get("fp16"), Mapping) else None
    # Modes are compared by value: one may be a string, or a member of another library's enum.
    if mode is not None and getattr(mode, "value", mode) not in [each.value for each in AMP_TYPE]:
        found.problems.append(
            Problem(("fp16", "mode"), f"must be AMP_TYPE.NAIVE, AMP_TYPE.TORCH or AMP_TYPE.APEX, found {mode!r}")
        )


# There is no placeholder: "auto" is the name of a placement policy there, and nothing is left for others to decide.
TABLE = Table(_KEYS, "zero", finish)
