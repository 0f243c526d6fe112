"""What the integrations share: ranks in another library's loop, windows of micro-batches, mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemini.checkpoint.loading import load_checkpoint
from gemini.checkpoint.saving import save_checkpoint
from gemini.engine.config import Config
from gemini.engine.initialize import Source, agreed_config
from gemini.errors import CheckpointError, ConfigError, UnsupportedError
from gemini.launch import launched_config
from gemini.log import get_dist_logger
from gemini.model.plain import are_plain_processes
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.settings import Weights
from sharding import Collectives

# -- What a library's mixed precision means for a sharded model: the dtype of its weights, and casts around it.
#
# Autocast keeps fp32 weights and casts them for every operation. A sharded model has the weights themselves in 16 bits
# and their fp32 masters where the optimizer state is: less memory and traffic, and the same precision of updates. What
# goes in and what comes out is cast at the model's border, so that the script around it computes in fp32 as before.


MIXED = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What transformers and Accelerate call mixed precision, and the dtype of the weights that it means here."""


def mixed_weights(config: Config, mixed: torch.dtype | None, said: str) -> Weights:
    """`dtype=` of `ShardedModel` for a config and the library's mixed precision. Local.

    mixed: the dtype of mixed precision, None without it. said: how the user said so, for messages.

    Raises ConfigError if the config names another dtype.
    """
    own = config.dtype
    if mixed is None:
        # A config may ask for the casts by itself (`fp16.auto_cast` of DeepSpeed). A mapping of dtypes by module
        # says already where casts are.
        mixed = own if config.cast_inputs and isinstance(own, torch.dtype) else None
        return own if mixed is None else _with_casts(mixed)
    if own is not None and own != mixed:
        raise ConfigError(f"{said}, and the config says dtype={own}: leave one of them out")
    return _with_casts(mixed)


def _with_casts(dtype: torch.dtype) -> Weights:
    """The key "" chooses the root: its floating-point inputs are cast to `dtype`, its outputs back, or else to fp32."""
    return {"": dtype, "*": torch.float32}


# -- What a config says of batches and logs, where a script or its library decides about them.


_DEFAULT = Config()
_DECIDED_ELSEWHERE = {
    "train_batch_size": "the data loader and the micro-batches of a step decide",
    "train_micro_batch_size_per_gpu": "the data loader decides",
    "drop_last": "the data loader decides",
    "steps_per_print": "the script logs",
    "monitors": "the script logs",
    "autocast": "the library's mixed precision makes 16-bit weights; torch.autocast in the script works, too",
}


def window_of(config: Config, world_size: int) -> int | None:
    """Micro-batches of an optimizer step, if the config says so, or both batch sizes; None if it does not. Local."""
    sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu)
    # One batch size alone leaves the other to the data loader, and so says nothing of the number of micro-batches.
    if config.gradient_accumulation_steps is None and None in sizes:
        return None
    return config.batch_sizes(world_size).accumulation


def without_effect(config: Config, elsewhere: Mapping[str, str] = _DECIDED_ELSEWHERE) -> list[str]:
    """A line for each key that changes nothing, with what happens instead. Local.

    elsewhere: what the script or its library decides, by the config's field.
    """
    # A key that is left at its default asks for nothing, so it needs no line.
    here = {name: its for name, its in elsewhere.items() if getattr(config, name) != getattr(_DEFAULT, name)}
    return [f"without effect: {key}: {instead}" for key, instead in [*config.ignored, *here.items()]]


def refuse_made_elsewhere(config: Config, where: str) -> None:
    """Raises ConfigError for a config with an optimizer or a schedule, where these are made elsewhere. Local."""
    for name in ("optimizer", "scheduler"):
        if getattr(config, name) is not None:
            raise ConfigError(f"{name!r} in the config: {where}: leave it out of the config")


def was_skipped(optimizer: ShardedOptimizer) -> bool:
    """Whether the last step changed nothing, since a gradient was not finite: schedules stay then. Local."""
    report = optimizer.last_step
    return report is not None and report.skipped is not None


def config_of_all_ranks(source: Source, auto: Mapping[str, Any]) -> Config:
    """The config, if all ranks of the default group have the same one. Collective. Raises as `agreed_config` does.

    source: None: what `gemini.launch_from_torch(config=...)` was given, else all defaults.
    """
    return agreed_config(launched_config() if source is None else source, _all_ranks(), auto=auto)


def _all_ranks() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


# -- Accelerate's `ParallelismConfig`, which transformers takes, too.


_ELSEWHERE = {
    "tp_size": "divides tensors and gives its ranks equal batches: divide the model by parallelize_module or tp_plan, "
    "and give ShardedModel(..., device_mesh=mesh) the whole mesh",
    "cp_size": "divides batches by Accelerate's FSDP2: let the model exchange tokens, and give each rank its own",
    "sp_size": "divides batches by DeepSpeed: let the model exchange tokens, and give each rank its own",
}


def shard_group_of(parallelism: Any, config: Config, num_ranks: int) -> int | None:
    """The `shard_group_size` that a `ParallelismConfig` asks for, beside the config's. None: it asks for none. Local.

    Raises UnsupportedError for dimensions that are none of the data's, and ConfigError for numbers that contradict the
    ranks or the config.
    """
    if parallelism is None:
        return config.shard_group_size
    names = ("dp_replicate_size", "dp_shard_size", *_ELSEWHERE)
    sizes: dict[str, int] = {name: getattr(parallelism, name, 0) for name in names}
    if 0 in sizes.values():
        raise UnsupportedError(f"parallelism_config= must be a ParallelismConfig, found {type(parallelism).__name__}")
    for name, why in _ELSEWHERE.items():
        if sizes[name] > 1:
            raise UnsupportedError(f"parallelism_config= with {name}={sizes[name]} {why} (docs/parallelism.md)")
    replicas, shards = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    if replicas * shards == 1:  # it divides nothing
        return config.shard_group_size
    if replicas * shards != num_ranks:
        raise ConfigError(
            f"parallelism_config= has dp_replicate_size={replicas} and dp_shard_size={shards}, for {replicas * shards} "
            f"ranks, and there are {num_ranks}"
        )
    if config.shard_group_size not in (None, shards):
        raise ConfigError(
            f"parallelism_config= has dp_shard_size={shards}, and the config shard_group_size="
            f"{config.shard_group_size}: leave one of them out"
        )
    return shards if replicas > 1 else config.shard_group_size


# -- Ranks in another library's loop: whether it counts all of them, failures of which all must hear, common files.


_TAG = "state"


def refuse_kind(kind: str, instead: str) -> None:
    """Raises UnsupportedError where `accelerate launch` was told to shard models by another library. Local.

    kind: Accelerate's word for how processes train together. instead: what to write.
    """
    if not are_plain_processes(kind):
        raise UnsupportedError(f"Accelerate is set to {kind}, which shards or moves models itself: {instead}")


def refuse_unknown_ranks(known: int, whose: str, remedy: str) -> None:
    """Raises UnsupportedError if there are other ranks than a library knows of. Local.

    transformers and Accelerate make a process group on a machine without a GPU, and then count each process as the only
    one, unless they are told to use the CPU. Each rank would train on all of the data, and write the same files.

    known: how many processes the library counts. whose: what in it says so. remedy: what to write instead.
    """
    group = _all_ranks()
    ranks = 1 if group is None else group.size()
    if known != ranks:
        raise UnsupportedError(
            f"there are {ranks} ranks, of which {whose} knows {known}: each would train on all of the data and write "
            f"the same files. On a machine without a GPU {remedy}"
        )


def folder_of_rank_0(folder: str) -> str:
    """Rank 0's name of a folder that all ranks write into, where the time may be a part of the name. Collective."""
    group = _all_ranks()
    if group is None:
        return folder
    named = [name.decode() for name in Collectives(group).all_gather_bytes(folder.encode())]
    other = next((rank for rank, name in enumerate(named) if name != named[0]), None)
    if other is not None:
        get_dist_logger().warning(
            f"output_dir differs by rank: {named[0]!r} on rank 0, {named[other]!r} on rank {other}. All ranks use rank "
            "0's; a name with the time in it is made on rank 0 and broadcast",
            ranks=[0],
        )
    return named[0]


@contextmanager
def publishing_by_all(models: Iterable[ShardedModel]) -> Iterator[None]:
    """Around collectives of several models: an exception that leaves the block is told to the ranks of each of them.

    Another rank may wait in a collective of any of the models, and hears only of failures that this model knows of.
    Local. Raises nothing of its own.
    """
    with ExitStack() as publishing:
        for model in models:
            publishing.enter_context(model.chunk_manager.communicator.publishing())
        yield


@contextmanager
def ending_together(models: Iterable[ShardedModel], done: str) -> Iterator[None]:
    """Around what ranks read or write by themselves: one that fails tells the others, and all end together.

    done: what is over then, for messages. Collective unless there is no model. Raises RemoteRankError.
    """
    models = list(models)
    with publishing_by_all(models):
        yield
        if models:
            models[0].chunk_manager.communicator.wait_for_all(done)


def save_shards(folder: Path, model: ShardedModel, optimizer: ShardedOptimizer | None) -> None:
    """Write a model's and an optimizer's state beside a library's files, each rank its part. Collective.

    Raises CheckpointError on all ranks, also where they see different folders.
    """
    save_checkpoint(folder, model, optimizer, tag=_TAG)


def load_shards(folder: Path, model: ShardedModel, optimizer: ShardedOptimizer | None) -> bool:
    """Load what `save_shards` has written, on any number of ranks; False if it is not there. Collective.

    Raises CheckpointError on all ranks, also if some find it and others do not, and what `load_checkpoint` raises.
    """
    # After a failure that the script caught, ranks start together again before any other collective.
    model.chunk_manager.step.check_idle("loading a checkpoint", after_updates=True)
    is_there = bytes([(folder / _TAG).is_dir()])
    found = model.chunk_manager.communicator.all_gather_bytes(is_there, "files of a checkpoint")
    if len({*found}) > 1:
        missing = [str(rank) for rank, its in enumerate(found) if its == b"\0"]
        raise CheckpointError(
            f"ranks {', '.join(missing)} do not find {folder}, and others do: resume from a folder that every rank can "
            "read"
        )
    if found[0] == b"\0":
        return False
    load_checkpoint(folder, model, optimizer, tag=_TAG, weights_only=optimizer is None)
    return True
