"""From what a user has, and a config, to an `Engine`: what both front ends share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gemini.engine.config import Config
from gemini.engine.engine import Engine
from gemini.engine.schedules import make_schedule
from gemini.errors import ConfigError, UnsupportedError
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer

OptimizerLike = Optimizer | Callable[..., Optimizer] | None
_GIVEN = "initialize() was given another one, which is used"
SchedulerLike = Any  # a schedule, or a callable that makes one of an optimizer


def assemble(
    engine_class: type[Engine],
    config: Config,
    model: nn.Module,
    optimizer: OptimizerLike,
    parameters: Iterable[Any] | None = None,
    criterion: Callable[..., Any] | None = None,
    lr_scheduler: SchedulerLike = None,
    process_group: dist.ProcessGroup | None = None,
) -> Engine:
    """The engine. What cannot be combined is refused before the model is wrapped. Collective."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, found {type(model).__name__}")
    if optimizer is not None and not inspect.isclass(optimizer):  # a class takes the config's `params`
        config = config.without("optimizer", _GIVEN)
    if lr_scheduler is not None:
        config = config.without("scheduler", _GIVEN)
    if optimizer is None and config.optimizer is None and (lr_scheduler is not None or config.scheduler is not None):
        raise ConfigError(
            "a scheduler needs an optimizer: give initialize(optimizer=...), or 'optimizer' in the config"
        )
    if not isinstance(model, ShardedModel):
        model = ShardedModel(model, process_group=process_group, settings=config.settings())
    plain = optimizer_of(model, optimizer, config, parameters)
    if plain is None:
        return engine_class(model, None, criterion, None, config=config)
    its = plain if isinstance(plain, ShardedOptimizer) else ShardedOptimizer(model, plain, **config.optimizer_options())
    return engine_class(model, its, criterion, scheduler_of(lr_scheduler, config, its, plain), config=config)


def optimizer_of(
    model: ShardedModel, given: OptimizerLike, config: Config, parameters: Iterable[Any] | None = None
) -> Optimizer | None:
    """The optimizer that was given, or made by what was given or by the config. Local."""
    if isinstance(given, Optimizer):
        return given
    its = list(model.parameters() if parameters is None else parameters)
    if given is None:
        return None if config.optimizer is None else config.optimizer.make(its)
    arguments = config.optimizer.params if config.optimizer is not None and inspect.isclass(given) else {}
    made = given(its, **arguments)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer={given!r} must make a torch optimizer of parameters, it made {type(made).__name__}")
    return made


def scheduler_of(given: SchedulerLike, config: Config, optimizer: ShardedOptimizer, plain: Optimizer) -> Any:
    """The schedule, acting on the sharded optimizer's param groups. Local.

    Those are the plain optimizer's own, so a schedule that was made of that goes on.
    """
    if given is None:
        return None if config.scheduler is None else make_schedule(config.scheduler, optimizer)
    if isinstance(given, LRScheduler):
        if given.optimizer is not optimizer and given.optimizer is not plain:
            raise UnsupportedError("lr_scheduler belongs to another optimizer than the one that was given")
        given.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a step() that it did not see
        return given
    return given(optimizer) if callable(given) and not hasattr(given, "step") else given
