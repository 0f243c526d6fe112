"""`deepspeed.initialize` and the options that its scripts add: DeepSpeed's call form."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from gemini.deepspeed.engine import DeepSpeedEngine
from gemini.engine.config import load_config
from gemini.engine.initialize import OptimizerLike, SchedulerLike, Source, agreed, assemble, say
from gemini.errors import ConfigError
from gemini.launch import launch_from_torch


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, `--deepspeed_config PATH` and `--local_rank N`, for `initialize(args=...)`. Local."""
    group = parser.add_argument_group("DeepSpeed", "the names of DeepSpeed's options; gemini trains")
    group.add_argument("--deepspeed", action="store_true", help="accepted; training is always sharded")
    group.add_argument("--deepspeed_config", metavar="PATH", help="a config in DeepSpeed's keys: JSON, YAML or TOML")
    # Scripts for DeepSpeed's launcher often define it themselves, and argparse refuses a second definition.
    if "--local_rank" not in parser._option_string_actions:
        group.add_argument("--local_rank", type=int, default=-1, help="accepted; the launcher's environment says it")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: SchedulerLike = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Source = None,
    mesh_param: Any = None,
    config_params: Source = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """An engine that trains the model sharded, as a DeepSpeed config says. Collective: every rank calls it alike.

    Args:
        args: with `deepspeed_config`, the path of a config, where `config` is None. Or the model, if `model` is None:
            DeepSpeed's page gives it as the first argument.
        model: any module, also one from `zero.Init`.
        optimizer: over the model's parameters, or a callable that makes one of them. None: the config's.
        model_parameters: parameters or param groups for the config's optimizer. None: all of the model.
        training_data: a dataset, of which a loader gives each rank its part, in micro-batches of the config's size.
        lr_scheduler: of the optimizer, or a callable that makes one of it. The engine moves it.
        distributed_port: has no effect: the launcher chooses it.
        mpu: an object whose `get_data_parallel_group()` gives the ranks. None: all of them.
        dist_init_required: False: a process group exists already. Otherwise it is made if there is none.
        collate_fn: for the loader.
        config: a dict, or the path of a JSON file, in DeepSpeed's keys or gemini's.
        mesh_param: must be None: sharding over a mesh of ranks is not there.
        config_params: an older name of `config`.

    Returns the engine, its optimizer, the loader and the schedule. Raises ConfigError without a config or for one that
    is not valid, DivergenceError if the ranks' configs differ, and what `ShardedModel` and `ShardedOptimizer` raise.
    """
    if model is None and isinstance(args, nn.Module):
        args, model = None, args
    if dist_init_required is not False and not dist.is_initialized():
        # As with DeepSpeed, random numbers are left to the script.
        launch_from_torch(seed=None)
    group = mpu.get_data_parallel_group() if mpu is not None else None
    # To `agreed` None means this rank alone.
    ranks = dist.group.WORLD if group is None and dist.is_initialized() else group
    sources = config, config_params, getattr(args, "deepspeed_config", None)
    # Some keys are DeepSpeed's and ours, with other meanings: "Adam" is AdamW there.
    agreed_config = agreed(
        lambda size: load_config(_only(sources, mesh_param), prefers="deepspeed", world_size=size), ranks
    )
    # Checked only here: a rank that raised before would leave the others waiting in the agreement.
    if model is None:
        raise TypeError("initialize(model=...) needs a module")
    engine = assemble(DeepSpeedEngine, agreed_config, model, optimizer, model_parameters, None, lr_scheduler, group)
    assert isinstance(engine, DeepSpeedEngine)
    say(engine)
    loader = engine.set_training_data(training_data, collate_fn)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _only(sources: Iterable[Source], mesh_param: Any) -> Source:
    """The config among the places where it may be given. A rank that raises tells the others."""
    given = [each for each in sources if each is not None]
    if len(given) != 1:
        raise ConfigError(
            f"initialize() needs one config, as config=, config_params= or args.deepspeed_config, found {len(given)}"
        )
    if mesh_param is not None:
        raise ConfigError("mesh_param: sharding over a mesh of ranks is not there; leave it out")
    return given[0]
