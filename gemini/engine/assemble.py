"""Assembles an `Engine` from the user's objects and a config. Both front ends share it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gemini.engine.config import Config
from gemini.engine.config.config import SETTINGS
from gemini.engine.engine import Engine
from gemini.engine.moving import moves_by_metric
from gemini.engine.schedules import make_schedule
from gemini.errors import ConfigError, UnsupportedError
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.settings import Settings

OptimizerLike = Optimizer | Callable[..., Optimizer] | None
_GIVEN = "initialize() was given another one, which is used"
SchedulerLike = Any  # a schedule, or a callable that makes one from an optimizer


def assemble(
    engine_class: type[Engine],
    config: Config,
    model: nn.Module,
    optimizer: OptimizerLike,
    parameters: Iterable[Any] | None = None,
    criterion: Callable[..., Any] | None = None,
    lr_scheduler: SchedulerLike = None,
    process_group: dist.ProcessGroup | None = None,
    moves_given: bool = True,
) -> Engine:
    """Make the engine. Arguments that cannot be combined are refused before the model is wrapped. Collective.

    moves_given: whether the engine moves a schedule that is given as an object, rather than the script.
    Raises TypeError for an argument of another kind, ConfigError and UnsupportedError for what cannot be combined, and
    what `ShardedModel` and `ShardedOptimizer` raise.
    """
    # Wrapping changes the user's module for good: what can be refused is refused before it.
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, found {type(model).__name__}")
    _check_kinds(optimizer, criterion, lr_scheduler)
    # The engine moves what the config names and what a callable makes, in both call forms: the script has no object
    # whose `step` it could call.
    moves = moves_given or not _is_schedule(lr_scheduler)
    # A callable has not made its schedule yet. What it makes is looked at in `scheduler_of`.
    if moves:
        _refuse_plateau(lr_scheduler)
    parameters = None if parameters is None else _checked_parameters(parameters)
    # Objects that were given replace those that the config names. An optimizer class takes the config's `params`.
    if optimizer is not None and not inspect.isclass(optimizer):
        config = config.without("optimizer", _GIVEN)
    if lr_scheduler is not None:
        config = config.without("scheduler", _GIVEN)
    # This is an error rather than one more key without effect: the user wants a training, and would get an evaluation.
    if optimizer is None and config.optimizer is None and (lr_scheduler is not None or config.scheduler is not None):
        raise ConfigError(
            "a scheduler needs an optimizer: give initialize(optimizer=...), or 'optimizer' in the config"
        )
    if isinstance(model, ShardedModel):
        # A model is wrapped once. The config's other fields, such as clipping, still count.
        config = _as_wrapped(config, model)
    else:
        sizes = config.batch_sizes(_num_ranks(process_group))
        # The plan needs the number of micro-batches, also if the config only gives batch sizes.
        settings = replace(config.settings(), gradient_accumulation_steps=sizes.accumulation)
        model = ShardedModel(model, process_group=process_group, settings=settings)
    # The optimizer comes after the model, since a callable gets the wrapped model's parameters. One that was made
    # before has the same parameter objects.
    plain = optimizer_of(model, optimizer, config, parameters)
    if plain is None:
        return engine_class(model, None, criterion, None, config=config)
    sharded = (
        plain if isinstance(plain, ShardedOptimizer) else ShardedOptimizer(model, plain, **config.optimizer_options())
    )
    schedule = scheduler_of(lr_scheduler, config, sharded, plain)
    return engine_class(model, sharded, criterion, schedule, config=config, moves_schedule=moves)


def _num_ranks(process_group: dist.ProcessGroup | None) -> int:
    # There is no communicator yet that could be asked.
    if process_group is not None:
        return process_group.size()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _check_kinds(optimizer: Any, criterion: Any, lr_scheduler: Any) -> None:
    """Raises TypeError for objects of a wrong kind, which would fail later, in the middle of a training."""
    if isinstance(optimizer, str):
        raise TypeError(
            f"optimizer={optimizer!r} is a name, which belongs into the config: "
            f"{{'optimizer': {{'type': {optimizer!r}, 'params': {{...}}}}}}"
        )
    if not (optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise TypeError(f"optimizer must be an optimizer, or a callable that makes one, found {optimizer!r}")
    if not (criterion is None or callable(criterion)):
        raise TypeError(f"criterion must be a function of outputs and labels, found {criterion!r}")
    # A schedule need not be a class of torch's: any object with a `step` may be one.
    if not (lr_scheduler is None or callable(lr_scheduler) or hasattr(lr_scheduler, "step")):
        raise TypeError(f"lr_scheduler must be a schedule, or a callable that makes one, found {lr_scheduler!r}")


def _is_schedule(given: Any) -> bool:
    """Whether `given` is a schedule, rather than None or a callable that makes one."""
    # A class has a `step`, too, and is called with the optimizer to make a schedule.
    return given is not None and not inspect.isclass(given) and hasattr(given, "step")


def _refuse_plateau(schedule: Any) -> None:
    """Raises UnsupportedError for a schedule whose `step` takes a metric, which the engine does not have."""
    if moves_by_metric(schedule):
        raise UnsupportedError(
            "lr_scheduler=ReduceLROnPlateau moves by a metric, which the engine does not know: make it after "
            "initialize(), as ReduceLROnPlateau(engine.optimizer), and call its step(metric) yourself"
        )


def _checked_parameters(parameters: Iterable[Any]) -> list[Any]:
    """The parameters as a list. Raises TypeError for a tensor, which would be iterated, and ValueError for none."""
    if isinstance(parameters, Tensor):
        raise TypeError(
            "model_parameters must be a list of parameters or param groups, found a tensor: put it in a list"
        )
    # An iterator such as `model.parameters()` can be read once, and its elements are needed after the model is wrapped.
    found = list(parameters)
    if not found:
        raise ValueError(
            "model_parameters is empty: an iterator gives its parameters once. Leave it out to train all of the model"
        )
    return found


def _as_wrapped(config: Config, model: ShardedModel) -> Config:
    """The config, with notes on its fields that have no effect because the model is wrapped with other values."""
    wanted, plain = config.settings(), Settings()
    ignored = [
        (name, f"the model was wrapped before, with {getattr(model.settings, name)!r}")
        for name in SETTINGS
        # The engine counts micro-batches by the config in any case. The model only plans memory by this field.
        if name != "gradient_accumulation_steps"
        # A value that is the default need not have been given, so it contradicts nothing.
        and getattr(wanted, name) not in (getattr(plain, name), getattr(model.settings, name))
    ]
    return config.with_notes([*config.ignored, *ignored], config.constants)


def optimizer_of(
    model: ShardedModel, given: OptimizerLike, config: Config, parameters: Iterable[Any] | None = None
) -> Optimizer | None:
    """The optimizer that was given, or made by what was given or by the config. Local.

    Raises TypeError if a callable that was given makes something else.
    """
    if isinstance(given, Optimizer):
        return given
    chosen_parameters = list(model.parameters() if parameters is None else parameters)
    if given is None:
        return None if config.optimizer is None else config.optimizer.make(chosen_parameters)
    # A lambda or a partial has its own arguments, and would raise on those of the config.
    arguments = config.optimizer.params if config.optimizer is not None and inspect.isclass(given) else {}
    made = given(chosen_parameters, **arguments)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer={given!r} must make a torch optimizer of parameters, it made {type(made).__name__}")
    return made


def scheduler_of(given: SchedulerLike, config: Config, optimizer: ShardedOptimizer, plain: Optimizer) -> Any:
    """The schedule, which acts on the sharded optimizer's param groups. Local.

    Those are the plain optimizer's own, so a schedule that was made of that goes on. Raises UnsupportedError for a
    schedule of another optimizer.
    """
    if given is None:
        return None if config.scheduler is None else make_schedule(config.scheduler, optimizer)
    if isinstance(given, LRScheduler):
        # Its rates would go into param groups that no step reads, and the rate would silently stay.
        if given.optimizer is not optimizer and given.optimizer is not plain:
            raise UnsupportedError("lr_scheduler belongs to another optimizer than the one that was given")
        # torch's schedule watches the `step` of the optimizer that it was made of, and the engine may call another one.
        # Without this flag it would warn, at its first move, that it moves before the optimizer.
        given.optimizer._opt_called = True  # type: ignore[attr-defined]
        return given
    if not _is_schedule(given):
        given = given(optimizer)
        _refuse_plateau(given)
    return given
