"""What `transformers.TrainingArguments` mean for a sharded training: what a config takes of them, what is refused.

A config may leave out what they say, or say "auto" in DeepSpeed's keys. What both say must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn

from gemini.engine.config import Config
from gemini.engine.config.config import OptimizerConfig
from gemini.errors import ConfigError, UnsupportedError
from gemini.integrations.ranks import refuse_unknown_ranks
from optim import HybridAdam

_SAVES_ON_ALL_RANKS = "5.23"
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZER = {
    "lr": lambda args: args.learning_rate,
    "betas": lambda args: [args.adam_beta1, args.adam_beta2],
    "eps": lambda args: args.adam_epsilon,
    "weight_decay": lambda args: args.weight_decay,
}
_DEFAULT = Config()
_SAID_BY_ARGUMENTS = {
    "monitors": "report_to of TrainingArguments says where metrics go",
    "steps_per_print": "logging_steps of TrainingArguments does it",
    "drop_last": "dataloader_drop_last of TrainingArguments does it",
}
_SHARDS = "shards the model itself: leave it out, and give Trainer(...) the stage and the budgets"
# Each function returns the value that the message quotes, or a false one where the argument is not given.
_REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deepspeed": (
        lambda args: args.deepspeed,
        "wants the package deepspeed: leave it out, and give the same file to Trainer(config=...)",
    ),
    "fsdp": (lambda args: args.fsdp, _SHARDS),
    "parallelism_config": (lambda args: args.parallelism_config, "divides models in ways that gemini does not"),
    "auto_find_batch_size": (
        lambda args: args.auto_find_batch_size,
        "starts a training again after one rank has run out of memory, which the others do not follow: choose "
        "per_device_train_batch_size, with gradient_accumulation_steps; `gemini estimate` says what fits",
    ),
    "fp16_full_eval": (lambda args: args.fp16_full_eval, "casts the model: give fp16=True, and weights are fp16"),
    "bf16_full_eval": (lambda args: args.bf16_full_eval, "casts the model: give bf16=True, and weights are bf16"),
    "mixed_precision": (
        lambda args: args.mixed_precision not in DTYPES and args.mixed_precision,
        f"is not one of {', '.join(DTYPES)}",
    ),
}


def refuse_unsupported(args: Any, model: Any) -> None:
    """Raises UnsupportedError for what a sharded training cannot do, with what to do instead. Local."""
    for name, (is_given, why) in _REFUSED.items():
        value = is_given(args)
        if value:
            raise UnsupportedError(f"TrainingArguments({name}={value!r}) {why}")
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"{args.n_gpu} GPUs are visible to one process, which trains on one: start a process for each with "
            f"torchrun --nproc-per-node {args.n_gpu}, or show it one with CUDA_VISIBLE_DEVICES"
        )
    refuse_unknown_ranks(args.world_size, "TrainingArguments", "give TrainingArguments(use_cpu=True)")
    # Earlier versions ask the model for its weights on one rank alone, and all ranks hold them.
    if args.world_size > 1 and Version(transformers.__version__) < Version(_SAVES_ON_ALL_RANKS):
        raise UnsupportedError(
            f"transformers {transformers.__version__} saves models on one rank alone: on several ranks install "
            f"transformers >= {_SAVES_ON_ALL_RANKS}"
        )
    # A map onto one device is accepted, because the plan places the weights wherever they were loaded.
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UnsupportedError(
            "the model was loaded with device_map= onto several devices: load it without, or inside "
            "gemini.ZeroInitContext(), which shards it while it is loaded"
        )


def auto_values(args: Any, num_training_steps: int) -> dict[str, Any]:
    """Values for keys of DeepSpeed's that say "auto", by dotted path: those that transformers fills in too. Local."""
    # `num_training_steps` is provisional at first. `create_scheduler` reads the config again with the real number.
    return {
        "train_batch_size": _train_batch_size(args),
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        **{f"optimizer.params.{name}": value(args) for name, value in _OPTIMIZER.items()},
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "scheduler.params.warmup_num_steps": args.get_warmup_steps(num_training_steps),
        "scheduler.params.total_num_steps": num_training_steps,
        "fp16.enabled": args.mixed_precision == "fp16",
        "bf16.enabled": args.mixed_precision == "bf16",
    }


def refuse_contradictions(config: Config, args: Any) -> None:
    """Raises ConfigError, with a line for each value of the config that TrainingArguments say otherwise. Local."""
    # Of each pair only a value that the config names is compared: None means that the config leaves it out.
    given = {} if config.optimizer is None else config.optimizer.params
    # transformers compares these with a DeepSpeed file too. Without the check one of two values would win silently.
    both = [
        ("train_batch_size", config.train_batch_size, "the product of the others", _train_batch_size(args)),
        ("gradient_accumulation_steps", config.gradient_accumulation_steps, "", args.gradient_accumulation_steps),
        ("clip_grad_norm", config.clip_grad_norm, "max_grad_norm", args.max_grad_norm),
        (
            "train_micro_batch_size_per_gpu",
            config.train_micro_batch_size_per_gpu,
            "per_device_train_batch_size",
            args.per_device_train_batch_size,
        ),
        *_of_the_optimizer(given, args),
    ]
    wrong = [
        f"{name} is {its!r} in the config and {theirs!r} in TrainingArguments" + (f" ({other})" if other else "")
        for name, its, other, theirs in both
        if its is not None and its != theirs
    ]
    if wrong:
        raise ConfigError("\n".join([*wrong, 'Leave them out of the config (in DeepSpeed\'s keys: say "auto")']))


def _of_the_optimizer(given: dict[str, Any], args: Any) -> Iterator[tuple[str, Any, str, Any]]:
    words = {"lr": "learning_rate", "betas": "adam_beta1, adam_beta2", "eps": "adam_epsilon"}
    for name, value in _OPTIMIZER.items():
        # A Python config may have a tuple where TrainingArguments give a list.
        its = given.get(name)
        yield f"optimizer.params.{name}", list(its) if isinstance(its, tuple) else its, words.get(name, ""), value(args)


def class_and_arguments(optimizer: OptimizerConfig, args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments of the config's optimizer, and what TrainingArguments say of it beside that. Local."""
    # The defaults of the optimizer tell which arguments it takes. The one for the training is made by the Trainer.
    made = optimizer.make([nn.Parameter(torch.zeros(1, device="cpu"))])
    # TrainingArguments always have betas, which SGD, for example, does not take.
    found = {name: value(args) for name, value in _OPTIMIZER.items() if name in made.defaults}
    return type(made), {**found, **optimizer.params}


def fused(kind: Any, arguments: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """The fused AdamW of chunks in place of torch's, which would step parameter by parameter. Local.

    kind, arguments: what `TrainingArguments(optim=)` means; "adamw_torch_fused" is the default. None for any other.
    """
    other_arguments = {name: value for name, value in arguments.items() if name != "fused"}
    # `get_optimizer_cls_and_kwargs` may be a subclass's and add arguments that `HybridAdam` does not have, as amsgrad.
    is_fused = (
        kind is torch.optim.AdamW
        and arguments.get("fused") is True
        and other_arguments.keys() <= {"lr", "betas", "eps"}
    )
    return (HybridAdam, other_arguments) if is_fused else None


def without_effect(config: Config) -> list[tuple[str, str]]:
    """Keys of the config that change nothing, and what happens instead. Local."""
    said = {
        name: instead
        for name, instead in _SAID_BY_ARGUMENTS.items()
        if getattr(config, name) != getattr(_DEFAULT, name)
    }
    return [*config.ignored, *said.items()]


def _train_batch_size(args: Any) -> int:
    # Samples that make one optimizer step, over all ranks.
    size: int = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    return size
