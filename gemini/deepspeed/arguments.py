"""What a script for DeepSpeed's launcher does before it makes a model."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gemini.launch import launch_from_torch
from optim.hyperparameters import refuse_unknown_arguments

_BY_ENVIRONMENT = (
    "auto_mpi_discovery",
    "distributed_port",
    "verbose",
    "init_method",
    "config",
    "rank",
    "world_size",
    "mesh_device",
)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, `--deepspeed_config PATH` and `--local_rank N`, for `initialize(args=...)`. Local."""
    group = parser.add_argument_group("DeepSpeed", "the names of DeepSpeed's options; gemini trains")
    group.add_argument("--deepspeed", action="store_true", help="accepted; training is always sharded")
    group.add_argument("--deepspeed_config", metavar="PATH", help="a config in DeepSpeed's keys: JSON, YAML or TOML")
    # Scripts for DeepSpeed's launcher often define it themselves, and argparse refuses a second definition.
    if "--local_rank" not in parser._option_string_actions:
        group.add_argument("--local_rank", type=int, default=-1, help="accepted; the launcher's environment says it")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta = timedelta(minutes=10),
    dist_init_required: bool | None = None,
    **without_effect: Any,
) -> None:
    """Join the ranks that a launcher has started, unless a process group exists already. Collective.

    Args:
        dist_backend: as in `launch_from_torch`.
        timeout: after which a rank that does not answer counts as lost.
        dist_init_required: False does nothing.
        without_effect: DeepSpeed's other arguments: torchrun's environment says what they say.

    Raises TypeError for a name that DeepSpeed does not know either.
    """
    refuse_unknown_arguments(
        "init_distributed",
        [name for name in without_effect if name not in _BY_ENVIRONMENT],
        ["dist_backend", "timeout", "dist_init_required", *_BY_ENVIRONMENT],
    )
    # As with DeepSpeed, random numbers are left to the script: no seed.
    if dist_init_required is not False and not dist.is_initialized():
        launch_from_torch(backend=dist_backend, seed=None, rank_timeout=timeout.total_seconds())
