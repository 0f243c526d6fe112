"""`Trainer` and `Seq2SeqTrainer`: Hugging Face's, which train sharded under a budget.

A script changes the line that imports them. As with DeepSpeed, `trainer.model` is the Hugging Face model itself, whose
parameters lie in chunks, and `trainer.model_wrapped` is the `ShardedModel` that the loop calls. What the Trainer does
with a model, an optimizer, and files that one rank writes goes through the methods below; the rest is its own.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from gemini.integrations.needed import needed

with needed("accelerate", "transformers"):
    import accelerate
    import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, check_target_module_exists

from gemini.engine.config import Config
from gemini.engine.config.config import SETTINGS, OptimizerConfig
from gemini.engine.config.muon import check_modules
from gemini.engine.initialize import Source, say_model, scheduler_of
from gemini.engine.schedules import make_schedule
from gemini.errors import ConfigError, UnsupportedError
from gemini.integrations.shared import (
    MIXED,
    config_of_all_ranks,
    ending_together,
    folder_of_rank_0,
    load_shards,
    mixed_weights,
    refuse_kind,
    refuse_unknown_ranks,
    save_shards,
    shard_group_of,
    was_skipped,
    without_effect,
)
from gemini.model.plain import GatheredParameters
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer, refuse_clipping
from gemini.settings import BUDGETS, Settings
from optim import HALF_DTYPES, HybridAdam
from optim.adam import refuse_unknown_arguments

# -- What peft saves of a sharded model: adapters, without a look at the trunk, which stays in its chunks.


def is_adapted(model: nn.Module) -> bool:
    """Whether the model is one of peft's. Nothing is imported for the answer. Local."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """Whole copies in host memory of what peft saves of all adapters, under the names of `model.state_dict()`.

    model: a `PeftModel` whose parameters lie in chunks. Collective: peft runs prompt encoders, too.
    """
    peft = sys.modules["peft"]
    variables: dict[str, Tensor] = model.state_dict(keep_vars=True)  # gathers nothing
    saved: set[Tensor] = set()  # membership only
    for adapter in model.peft_config:
        saved.update(peft.get_peft_model_state_dict(model, state_dict=variables, adapter_name=adapter).values())
    # With `keep_vars` peft returns the parameters themselves, so they are told by identity. `copy=True` matters on a
    # CPU, where `to` alone would return memory that the next step changes.
    return {name: value.detach().to("cpu", copy=True) for name, value in variables.items() if value in saved}


# -- The accelerator of a `transformers.Trainer` whose model is sharded: what it is asked to do is done by ours.


class TrainerAccelerator(accelerate.Accelerator):
    """The Trainer makes an `accelerate.Accelerator` by itself, which becomes one of these before anyone uses it."""

    sharded_optimizer: ShardedOptimizer | None = None
    settings_of_others: Settings | None = None  # of models that are evaluated beside the one that trains
    is_bounded = False  # the user bounds the memory of the one that trains
    others: tuple[ShardedModel, ...] = ()

    @property
    def its_optimizer(self) -> ShardedOptimizer:
        assert self.sharded_optimizer is not None, "the Trainer makes it before it trains"
        return self.sharded_optimizer

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return a sharded optimizer as it is: Accelerate would load its whole state on every rank."""
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model that is only evaluated, such as the reference model of DPO, which is frozen then. Collective.

        Any other model is Accelerate's to prepare, whose other arguments these are. Raises what `ShardedModel` raises.
        """
        is_plain = not isinstance(model, ShardedModel) and next(model.parameters(), None) is not None
        if not (evaluation_mode and is_plain and self.settings_of_others is not None):
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        # Its gradients would take memory, and nobody asks for them: the Trainers call it under `no_grad`.
        sharded = ShardedModel(model.requires_grad_(False), settings=self.settings_of_others)
        if self.is_bounded:
            sharded.change_budgets(model_data_memory=sharded.plan.packed_minimum_bytes)
        self.others = (*self.others, sharded)
        return sharded

    def close_others(self) -> None:
        """Close the models that are evaluated beside the one that trains. Collective."""
        for each in self.others:
            each.close()
        self.others = ()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of the loss, times the loss scale in fp16. Collective."""
        # The Trainer divides the loss by its micro-batches itself and tells Accelerate of one, so nothing divides here.
        # Its keyword arguments are for DeepSpeed and LOMO, whose backwards are not ours.
        self.its_optimizer.backward(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Return the exact norm of all gradients, before the next step clips them to `max_norm`, which may be inf."""
        # The Trainer always gives the parameters of the whole model, so clipping a part of them is not a case here.
        return self.its_optimizer.clip_grad_norm_(max_norm, norm_type)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """The schedule stays where a gradient was not finite."""
        return self.sharded_optimizer is not None and was_skipped(self.sharded_optimizer)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Do nothing: every micro-batch is reduced, since sums of whole gradients take 4 bytes a parameter and rank."""
        yield

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The plain module, under whose name and class the Trainer knows the model."""
        # `accelerate` unwraps classes that it knows, such as DDP, and `ShardedModel` is none of them.
        unwrapped = model.module if isinstance(model, ShardedModel) else model
        return super().unwrap_model(unwrapped, *args, **kwargs)  # type: ignore[no-any-return]


# -- What `transformers.TrainingArguments` mean for a sharded training: what a config takes of them, what is refused.
#
# A config may leave out what they say, or say "auto" in DeepSpeed's keys. What both say must be equal.


_SAVES_ON_ALL_RANKS = "5.23"
_PLAIN = "choose its plain training on several processes (torchrun, or accelerate launch --multi_gpu)"
_OPTIMIZER = {
    "lr": lambda args: args.learning_rate,
    "betas": lambda args: [args.adam_beta1, args.adam_beta2],
    "eps": lambda args: args.adam_epsilon,
    "weight_decay": lambda args: args.weight_decay,
}
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
    "auto_find_batch_size": (
        lambda args: args.auto_find_batch_size,
        "starts a training again after one rank has run out of memory, which the others do not follow: choose "
        "per_device_train_batch_size, with gradient_accumulation_steps; `gemini estimate` says what fits",
    ),
    "fp16_full_eval": (lambda args: args.fp16_full_eval, "casts the model: give fp16=True, and weights are fp16"),
    "bf16_full_eval": (lambda args: args.bf16_full_eval, "casts the model: give bf16=True, and weights are bf16"),
    "mixed_precision": (
        lambda args: args.mixed_precision not in MIXED and args.mixed_precision,
        f"is not one of {', '.join(MIXED)}",
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
    assert isinstance(made, torch.optim.Optimizer), "Muon beside Adam are two, which `muon_of` makes"
    # TrainingArguments always have betas, which SGD, for example, does not take.
    found = {name: value(args) for name, value in _OPTIMIZER.items() if name in made.defaults}
    return type(made), {**found, **optimizer.params}


def muon_of(optimizer: OptimizerConfig, args: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon of the model's hidden matrices, and Adam of the rest, as the config and TrainingArguments have them. Local.

    As in DeepSpeed, weight decay is of all parameters. With `TrainingArguments(optim_target_modules=)` Muon updates
    hidden matrices of these modules alone.
    """
    said = {name: value(args) for name, value in _OPTIMIZER.items()}
    named = OptimizerConfig(type=optimizer.type, params={**said, **optimizer.params})
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    made = named.make([parameter for parameter in names if parameter.requires_grad], names, _targets(args, model))
    optimizers = made if isinstance(made, list) else [made]
    check_modules(optimizers, model)
    return optimizers


def _targets(args: Any, model: nn.Module) -> set[Tensor] | None:
    """The weights of the modules that `optim_target_modules` names; None: it names none."""
    wanted = args.optim_target_modules
    if wanted is None:
        return None
    is_all = isinstance(wanted, str) and wanted.replace("_", "-") == "all-linear"
    found: set[Tensor] = set()
    for name, module in model.named_modules():
        if is_all or check_target_module_exists(wanted, name):
            found.update(module.parameters(recurse=False))
    if is_all:  # not what embeds, also where the head shares it
        tables = [each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
        found.difference_update(each.weight for each in tables)
    if not found:
        raise ConfigError(f"TrainingArguments(optim_target_modules={wanted!r}) names no module with weights for Muon")
    return found


_EIGHT_BIT = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit")


def in_eight_bits(args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """AdamW with moments of 8 bits, where `TrainingArguments(optim=)` names that of another library. Local.

    None for any other. Pages are of no use here: where states rest the plan says.
    """
    if getattr(args.optim, "value", args.optim) not in _EIGHT_BIT:
        return None
    betas = args.adam_beta1, args.adam_beta2
    return HybridAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "state_dtype": "8bit"}


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


def _train_batch_size(args: Any) -> int:
    # Samples that make one optimizer step, over all ranks.
    size: int = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    return size


def is_bounded(settings: Settings) -> bool:
    """Whether the user has said how many bytes the model may take. Local; raises nothing."""
    return any(getattr(settings, name) is not None for name in BUDGETS)


def beside(settings: Settings) -> Settings:
    """Settings of a frozen model beside one that is trained with `settings`. Local; raises nothing.

    Where the user bounds memory, the bound is that of the model that trains: the other one rests on the host, and has
    but the fewest slots on the device.
    """
    is_shared = settings.tensor_placement_policy in ("auto", "cpu", "cuda", "disk") and not is_bounded(settings)
    policy = settings.tensor_placement_policy if is_shared else "cpu"
    plain = Settings()
    of_training = ("gradient_accumulation_steps", "update_in_backward", "deferred_update", "reuse_fp16_shard")
    of_names = ("ignored_parameters", "disk_optim_frac", *BUDGETS)
    fields = {name: getattr(plain, name) for name in (*of_training, *of_names)}
    return replace(settings.with_policy(policy), **fields)


# -- `EmaCallback`: a Trainer that evaluates with the averages of the weights, and saves them.


_AVERAGES = "ema"  # the folder of averages in each checkpoint of the Trainer


class EmaCallback(transformers.TrainerCallback):
    """Has a Trainer of this module evaluate with the averages of the weights, and save them.

    The averages are those of the config: `Trainer(config={"ema": 0.999})`. Before the first averaging the weights are
    evaluated.

    Args:
        evaluates: `evaluate()` and `predict()` have the averages in the place of the weights, also inside a training.
        saves: each checkpoint has a folder "ema" with the averages, which `from_pretrained` loads, beside the weights.

    Local. Without averages, and in a Trainer that is not sharded, the training raises UnsupportedError as it begins.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, config={"ema": 0.999}, callbacks=[EmaCallback()])
    """

    def __init__(self, *, evaluates: bool = True, saves: bool = True) -> None:
        self.evaluates = evaluates
        self.saves = saves

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError where there are no averages. Local."""
        optimizer = kwargs.get("optimizer")
        if not isinstance(optimizer, ShardedOptimizer):
            raise UnsupportedError(
                "EmaCallback is for a Trainer of gemini.integrations.transformers, and this one is not sharded: import "
                "Trainer from there"
            )
        if optimizer.ema is None:
            raise UnsupportedError(
                'EmaCallback without averages: give Trainer(config={"ema": 0.999}), or a ShardedOptimizer(..., '
                "ema=0.999) in optimizers="
            )


# -- Which Trainer is sharded: the names and the default of its arguments.


def own_init(trainer: type) -> Any:
    """The `__init__` of the Trainer that `ShardedTraining` stands before, which says its arguments. Local."""
    after = trainer.__mro__[trainer.__mro__.index(ShardedTraining) + 1 :]
    return next(vars(each)["__init__"] for each in after if "__init__" in vars(each))


def by_name(init: Any, given: tuple[Any, ...]) -> dict[str, Any] | None:
    """Arguments by position under the names that they have in `init`; None where it does not name that many. Local."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [name for name, each in inspect.signature(init).parameters.items() if each.kind in kinds][1:]
    return dict(zip(names, given, strict=False)) if len(given) <= len(names) else None


def default_arguments(init: Any, model: Any) -> Any:
    """What the Trainer takes for arguments where `args` is left out: those of its own class. Local."""
    said = inspect.signature(init).parameters.get("args")
    hint = None if said is None else said.annotation
    if isinstance(hint, str):  # as with `from __future__ import annotations`
        hint = getattr(sys.modules[init.__module__], hint.partition("|")[0].strip(), None)
    kinds = [each for each in (hint, *get_args(hint)) if inspect.isclass(each)]
    kind = next((each for each in kinds if issubclass(each, transformers.TrainingArguments)), None)
    if kind is None or kind in (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments):
        return (kind or transformers.TrainingArguments)("tmp_trainer")
    # As TRL calls its folders: "Qwen3-0.6B-SFT".
    name = model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", ""))
    return kind(f"{name.rpartition('/')[2]}-{init.__qualname__.partition('.')[0].removesuffix('Trainer')}")


_Trainer: Any = object  # the one that is named beside it
SHARDS = "gemini"  # the folder of each checkpoint in which every rank has its part
_SOME_STEPS = 2  # of a schedule, until the Trainer has counted its steps


class ShardedTraining(_Trainer):
    """What makes a Trainer train sharded: `class MyTrainer(ShardedTraining, TheirTrainer)` for a Trainer of your own.

    Args:
        model: a module of Hugging Face's or of peft's, also from a `ZeroInitContext`; or a `ShardedModel`.
        others: the Trainer's other arguments by position, in its own order. Its `args`, TrainingArguments, are those of
            its own class where they are left out: bf16=True and fp16=True mean the dtype of the weights, which keep
            fp32 masters.
        config: a config, or the path of one, of any dialect that `gemini.initialize` reads. TrainingArguments say what
            it leaves out, and what is "auto" in DeepSpeed's keys. None: what `gemini.launch_from_torch(config=...)` was
            given, else all defaults.
        save_whole_state: checkpoints have the optimizer's state as the Trainer itself reads it, in one file, which
            rank 0 gathers in host memory. False: each rank writes its part, for any number of ranks to go on from.
        more: the Trainer's other arguments by name, and those of `ShardedModel`, such as stage=2 or
            device_memory="8GiB", which go before the config.

    Collective: every rank makes it alike, and calls what trains, evaluates, saves and loads. Raises UnsupportedError
    for arguments that gemini cannot train with, ConfigError for a config that is not valid or contradicts
    TrainingArguments, DivergenceError if the ranks' configs differ, TypeError for an unknown argument, and what the
    Trainer and `ShardedModel` raise.
    """

    optimizer: Any
    callback_handler: Any
    state: Any
    lr_scheduler: Any
    model_wrapped: Any
    optimizer_cls_and_kwargs: Any
    _created_lr_scheduler: bool
    preset: Source = None
    """The config of a class that another library makes, which has no argument for one."""

    def __init__(
        self,
        model: Any = None,
        *others: Any,
        config: Source = None,
        save_whole_state: bool = False,
        **more: Any,
    ) -> None:
        init = own_init(type(self))
        # By name, as Trainers of other libraries have other arguments behind the model.
        # The model alone is given by its name where theirs is not the first one, as in Trainers of LLaMA-Factory.
        named = by_name(init, (model, *others)) if others else {"model": model}
        others = () if named is not None else others
        more = {**({"args": others[0]} if others else {}), **more}
        # As with any function: an argument by position and by name is given twice.
        twice = [name for name in named or () if name in more and name != "model"]
        if twice:
            raise TypeError(f"{type(self).__name__}() got multiple values for argument {twice[0]!r}")
        more |= {name: value for name, value in (named or {}).items() if name != "model"}
        args = more.pop("args", None)
        self._saves_whole = save_whole_state
        options = {name: more.pop(name) for name in SETTINGS if name in more}
        takes = inspect.signature(super().__init__).parameters
        # A Trainer of the user's that takes `**kwargs` checks them itself.
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in takes.values()):
            valid = [*takes, "config", "save_whole_state", *SETTINGS]
            refuse_unknown_arguments(type(self).__name__, [name for name in more if name not in takes], valid)
        # The Trainer's own default: the checks below come before the Trainer makes it.
        args = default_arguments(init, model) if args is None else args
        refuse_unsupported(args, model)
        if not args.save_on_each_node:
            args.output_dir = folder_of_rank_0(args.output_dir)
        self._sharded: ShardedModel | None = None
        config = self.preset if config is None else config
        self._source = config
        self.sharding = self._read(args, _SOME_STEPS)
        """The config, with defaults in place of what it does not say."""
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        group_size = shard_group_of(args.parallelism_config, self.sharding, num_ranks)
        self.sharding = self.sharding.model_copy(update={"shard_group_size": group_size})
        if args.parallelism_config is not None:  # or Accelerate would divide models, too
            args = copy.copy(args)
            args.parallelism_config = None
        self._settings = self._settings_of(args, options)
        # The Trainer finds the names of labels, and the way to save, by the class of the plain model.
        if isinstance(model, ShardedModel):
            self._adopt(model, args, has_settings=bool(options) or config is not None)
            model = model.module
        # A Trainer of the user's that takes `*args` has no names for them.
        if others:
            super().__init__(model, args, *others[1:], **more)
        else:
            super().__init__(model=model, args=args, **more)
        if self.sharding.optimizer is not None:
            if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
                raise ConfigError("an optimizer is given to Trainer(...), and another is in the config: leave one out")
            # From this attribute the Trainer makes the optimizer over param groups of its own, in which biases and
            # norms do not decay. An optimizer that we made here would have to copy these groups.
            # Those of Muon and of the Adam beside it are made of the model's names, by `create_optimizer`.
            if not self.sharding.optimizer.is_muon:
                self.optimizer_cls_and_kwargs = class_and_arguments(self.sharding.optimizer, args)
        # With `model_init` each training makes a model of its own: the one of now is never trained.
        if self.model_init is None:
            self.model_wrapped = self.sharded_model

    # -- the config

    def _read(self, args: Any, num_training_steps: int) -> Config:
        config = config_of_all_ranks(self._source, auto_values(args, num_training_steps))
        refuse_contradictions(config, args)
        return config

    def _settings_of(self, args: Any, options: dict[str, Any]) -> Settings:
        fields = {name: getattr(self.sharding, name) for name in SETTINGS} | options
        config = self.sharding.model_copy(update=fields)
        mixed = MIXED[args.mixed_precision]
        if mixed is None and config.dtype in HALF_DTYPES:  # collators make fp32 inputs, whoever said it
            mixed = config.dtype
        dtype = mixed_weights(config, mixed, f"TrainingArguments say {args.mixed_precision}")
        if config.device is None:
            # None would choose an accelerator that `use_cpu=True` leaves alone.
            fields["device"] = "emulated" if args.device.type == "cpu" else args.device
        fields["dtype"] = dtype
        if fields["gradient_accumulation_steps"] is None:
            fields["gradient_accumulation_steps"] = args.gradient_accumulation_steps
        return Settings(**fields)

    def _adopt(self, model: ShardedModel, args: Any, has_settings: bool) -> None:
        if has_settings or MIXED[args.mixed_precision] is not None:
            raise ConfigError(
                "the model is a ShardedModel already: give the plain module, or give config, dtype (in place of "
                "bf16=True and fp16=True of TrainingArguments), stage and budgets to ShardedModel(...)"
            )
        self._sharded = model

    # -- model, optimizer, schedule

    @property
    def sharded_model(self) -> ShardedModel:
        """The model in chunks, made at the first use. Collective. Raises what `ShardedModel` raises."""
        if self._sharded is None:
            self._sharded = ShardedModel(self.model, settings=self._settings)
            # Accelerate compiles what it prepares, and a sharded model is not prepared by it.
            if self.args.torch_compile:
                self._sharded.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
            say_model(self._sharded, without_effect(self.sharding, _SAID_BY_ARGUMENTS))
        return self._sharded

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model for every training, as the Trainer does. The one before gives its memory back. Collective."""
        if self._sharded is not None:
            self._sharded.close()
            self._sharded = None
        made: nn.Module = super().call_model_init(trial)
        return made

    def create_accelerator_and_postprocess(self) -> None:
        """Do what the Trainer does. Raises UnsupportedError if Accelerate was told to shard the model itself."""
        super().create_accelerator_and_postprocess()
        # The Trainer constructs `accelerate.Accelerator` by that name, so the finished object changes its class. This
        # is safe because `TrainerAccelerator` has no state that `__init__` would set.
        self.accelerator.__class__ = TrainerAccelerator
        refuse_kind(self.accelerator.distributed_type.value, _PLAIN)
        self.accelerator.settings_of_others = beside(self._settings)
        self.accelerator.is_bounded = is_bounded(self._settings)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}  # a dtype of weights, no autocast

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the plan decides what of the model rests on the device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        # As this is another module than `self.model`, the Trainer takes it for wrapped, and does not let Accelerate
        # prepare it.
        return self.sharded_model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """A `ShardedOptimizer` of the Trainer's own optimizer, or of the config's, in the Trainer's param groups.

        Collective. Raises what `ShardedOptimizer` raises.
        """
        if not isinstance(self.optimizer, ShardedOptimizer):
            named, plain = self.sharding.optimizer, None
            if named is not None and named.is_muon:
                plain = muon_of(named, self.args, self.sharded_model)
            elif self.optimizer is None and self.optimizer_cls_and_kwargs is None:
                # None: super() asks again, as arguments of an optimizer that needs the model are used up there
                # Of 8 bits the Trainer would import the other library first.
                self.optimizer_cls_and_kwargs = in_eight_bits(self.args) or fused(
                    *self.get_optimizer_cls_and_kwargs(self.args, self.model)
                )
            sharded = self.sharded_model
            plain = super().create_optimizer(model) if plain is None else plain
            if self.args.max_grad_norm:
                # Before the first backward, which would update weights.
                what = f"TrainingArguments(max_grad_norm={self.args.max_grad_norm:g}), where 0 does not clip,"
                refuse_clipping(sharded, what)
            options = self.sharding.optimizer_options() | {"clip_grad_norm": None}  # the Trainer clips before each step
            self.optimizer = ShardedOptimizer(sharded, plain, **options)
            if self.lr_scheduler is not None:
                # This schedule came in `optimizers=`, and was made of the plain optimizer.
                self.lr_scheduler = scheduler_of(self.lr_scheduler, self.sharding, self.optimizer, plain)
        # The accelerator needs it also where it is a `ShardedOptimizer` of the user's, or that of an earlier training.
        self.accelerator.sharded_optimizer = self.optimizer
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The schedule that the config names, else the Trainer's own. Local. Raises what the schedule raises."""
        if self.lr_scheduler is None and self.sharding.scheduler is not None:
            # The config is read again: what says "auto" may follow from the number of steps, which is known only now.
            named = self._read(self.args, num_training_steps).scheduler
            assert named is not None
            self.lr_scheduler = make_schedule(named, self.optimizer if optimizer is None else optimizer)
            self._created_lr_scheduler = True  # so the next training makes another
        return super().create_scheduler(num_training_steps, optimizer)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the Trainer would read every gradient for the answer, which gathers it

    # -- generation

    @contextmanager
    def gathered_for_generation(self) -> Iterator[Any]:
        """Inside, all weights are whole on every rank, so that `generate` makes no collective per token. Collective.

        Yields the Hugging Face model. Raises SlotError if the weights do not fit together into the model's slots:
        `model.generate(..., synced_gpus=True)` then, outside, on every rank.
        """
        with GatheredParameters(self.sharded_model):
            yield self.model

    # -- averages of the weights

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the Trainer does, with an `EmaCallback` by the averages. Collective. Raises what the model raises."""
        with self._averaged("evaluates"):
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def _averaged(self, what: str) -> Iterator[bool]:
        """Inside, the model has the averages, if an `EmaCallback` says it and there are any, which it yields."""
        ema = self.optimizer.ema if isinstance(self.optimizer, ShardedOptimizer) else None
        its = (each for each in self.callback_handler.callbacks if isinstance(each, EmaCallback))
        if ema is None or ema.num_averaged == 0 or self.optimizer.is_closed or not any(getattr(i, what) for i in its):
            yield False
            return
        with ema.weights():
            yield True

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        with self._averaged("saves") as are_any:
            if are_any:
                folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
                self._save(str(folder / _AVERAGES))

    # -- files

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # Every rank gathers what is saved before any rank writes it, because the Trainer's own `_save` returns at once
        # on the other ranks.
        is_peft = is_adapted(self.model)
        if state_dict is None and is_peft:
            state_dict = adapter_weights(self.model)
        elif state_dict is None:
            state_dict = self.sharded_model.state_dict(rank0_only=self._writes_once)
        with self._together("weights are saved"):
            if is_peft and not self.args.should_save:
                # peft runs prompt encoders for what it saves, whose weights ranks gather from each other
                folder = self.args.output_dir if output_dir is None else output_dir
                self.model.save_pretrained(folder, state_dict=state_dict, is_main_process=False)
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Each rank writes its part of weights, masters and states into a folder of `gemini.save_checkpoint`.

        With adapters alone in training, and where nodes have disks of their own, rank 0 writes the whole state as the
        Trainer does: that of adapters is small, beside frozen weights that need not be saved with it.
        """
        state = None
        if self._writes_shards:
            save_shards(Path(output_dir, SHARDS), self.sharded_model, self.optimizer)
        else:
            state = self.optimizer.state_dict(rank0_only=self._writes_once)
        with self._together("the optimizer's state is saved"):
            if self.args.should_save:
                if state is not None:
                    torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Do what the Trainer does. `resume_from_checkpoint=True` takes the newest folder that was written whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_whole(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._together("the weights are loaded"):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self._together("the best weights are loaded"):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load each rank's part, or a whole state: that file is mapped, so that all ranks read the same pages."""
        if checkpoint is None:
            return
        has_shards = load_shards(Path(checkpoint, SHARDS), self.sharded_model, self.optimizer)
        names = [SCHEDULER_NAME] if has_shards else [OPTIMIZER_NAME, SCHEDULER_NAME]
        paths = [os.path.join(checkpoint, name) for name in names]
        missing = [path for path in paths if not os.path.isfile(path)]
        with self._together("the optimizer's state is loaded"):
            # A checkpoint has none of these files where `save_only_model=True` wrote it, and then no rank finds them.
            communicator = self.sharded_model.chunk_manager.communicator
            if communicator.least([len(missing)], "files that a checkpoint lacks")[0]:
                return
            if missing:
                raise FileNotFoundError(
                    f"this rank does not find {' and '.join(missing)}, and another rank does: resume from a folder "
                    "that every rank can read, or save with save_on_each_node=True"
                )
            *state, schedule = (torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in paths)
            for its in state:
                self.optimizer.load_state_dict(its)
            self.lr_scheduler.load_state_dict(schedule)

    @property
    def _writes_shards(self) -> bool:
        return self._writes_once and not self._saves_whole and not is_adapted(self.model)

    @property
    def _writes_once(self) -> bool:
        return not self.args.save_on_each_node

    def _together(self, done: str) -> AbstractContextManager[None]:
        """Around files that are read or written: a rank that cannot tells the others, and all are done behind it."""
        return ending_together([self.sharded_model], done)

    def end(self) -> None:
        """Do what the Trainer does at the very end: the model gives its memory back too. Collective."""
        # Closing is collective, so it comes before `super().end()`, which destroys the process group.
        if self._sharded is not None:
            self._sharded.close()
            self._sharded = None
        self.accelerator.close_others()
        super().end()


def _newest_whole(folder: str) -> str | None:
    """The newest of a Trainer's checkpoints that has the file which is written last."""
    found = [path.parent for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")]
    numbered = [path for path in found if path.name.rpartition("-")[2].isdigit()]
    newest = max(numbered, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)


def sharded_class(theirs: type, config: Source = None) -> type:
    """A class that trains as the Trainer `theirs` does, sharded by `config`, for a library that makes it. Local.

    config: as of `ShardedTraining`. Raises TypeError for a class that is no Trainer.
    """
    if not issubclass(theirs, transformers.Trainer):
        raise TypeError(f"{theirs.__name__} is no transformers.Trainer, and cannot be sharded as one")
    said = (
        f"`{theirs.__name__}`, sharded. Every rank makes and calls it alike. Raises what theirs and our Trainer raise."
    )
    return type(theirs.__name__, (ShardedTraining, theirs), {"__module__": __name__, "__doc__": said, "preset": config})


class Trainer(ShardedTraining, transformers.Trainer):
    """`transformers.Trainer` for a model whose training state is sharded; see `ShardedTraining` for the arguments.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, stage=3, device_memory="8GiB")
        >>> trainer.train(resume_from_checkpoint=True)
    """


class Seq2SeqTrainer(ShardedTraining, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer`, sharded; see `ShardedTraining` for the arguments.

    Where ranks gather weights from each other, those whose sentences end early go on until all have ended
    (`synced_gpus`).
    """

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Do what the Seq2SeqTrainer does. Collective. Raises what the model raises."""
        return super().evaluate(*args, **{"synced_gpus": self._gathers, **kwargs})

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the Seq2SeqTrainer does. Collective. Raises what the model raises."""
        return super().predict(*args, **{"synced_gpus": self._gathers, **kwargs})

    @property
    def _gathers(self) -> bool:
        model = self.sharded_model
        return model.settings.gathers(model.world_size)
