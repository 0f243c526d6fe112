"""`launch_from_torch` and `launch_from_slurm`: join the ranks that were started; one process alone needs nothing."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gemini.errors import UnsupportedError
from gemini.log import get_dist_logger

# -- `current_device`: where the user's input tensors go.


def current_device() -> torch.device:
    """The device for this process's input tensors: its current accelerator, else the CPU.

    The emulated device keeps its memory on the CPU. Local; raises nothing.

    Example:
        >>> batch = torch.randn(4, 8, device=current_device())
    """
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


# A rank that failed, or was killed, never counts itself as gone: the others stop waiting after this time.
_LEAVE_S = 20.0
_POLL_S = 0.02
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that systems give to connections
_config: Any = None
NO_LAUNCH = "GEMINI_NO_LAUNCH"
RANK_TIMEOUT_S = 600.0


def launched_config() -> Any:
    """The config that `launch_from_torch` or `launch_from_slurm` was given, for `initialize`. Local."""
    return _config


def was_launched() -> bool:
    """Whether a launcher has told this process which rank it is: torchrun, DeepSpeed's or the user's own. Local.

    `torch.distributed.is_torchelastic_launched()` knows torchrun alone: ranks of any other launcher would each train
    the whole model, and say nothing.
    """
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_group(process_group: Any) -> None:
    """Raises TypeError for what is neither a process group nor None. Local."""
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a ProcessGroup or None, found {type(process_group).__name__}")


def ranks_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that share a model: the given ones, else all that a launcher has started. None: this process alone.

    Where a launcher has started several and nobody has made a process group, it is made here, as by
    `launch_from_torch(seed=None)`: each rank would train a whole model of its own otherwise. GEMINI_NO_LAUNCH=1 leaves
    them apart. Collective then. Raises TypeError, and what `launch_from_torch` raises.
    """
    check_group(process_group)
    if process_group is not None or not dist.is_available():
        return process_group
    if not dist.is_initialized():
        started = int(os.environ["WORLD_SIZE"]) if was_launched() else 1
        # A process that a rank has started, as for loading data, has the rank's environment and is none.
        is_rank = multiprocessing.parent_process() is None
        if started == 1 or not is_rank or os.environ.get(NO_LAUNCH, "") not in ("", "0"):
            return None
        _join(None, None, RANK_TIMEOUT_S, verbose=True, why=f"joined by themselves ({NO_LAUNCH}=1 leaves them apart)")
    return dist.group.WORLD


def launch_from_torch(
    config: Any = None,
    *,
    backend: str | None = None,
    seed: int | None = 1024,
    rank_timeout: float = RANK_TIMEOUT_S,
    verbose: bool = True,
) -> None:
    """Join the ranks that `torchrun` has started: make the process group, choose this rank's device, seed. Collective.

    Any other launcher will do that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as DeepSpeed's does.
    A script that was started without one is one rank: it is only seeded. When the script ends without an exception,
    the ranks leave together.

    Args:
        config: what `initialize` takes where it is given none: a mapping, a path or a `Config`. None: nothing.
        backend: for `init_process_group`. None: gloo on the CPU, and torch's default on accelerators, as NCCL on CUDA.
        seed: for `torch.manual_seed`, the same on every rank. None leaves the random state as it is.
        rank_timeout: seconds after which a rank that does not answer counts as lost.
        verbose: whether rank 0 logs the number of ranks, the backend and the device.

    Raises UnsupportedError if a process group exists already, RuntimeError if this machine has fewer devices than
    ranks, and ValueError if RANK and WORLD_SIZE are set and MASTER_ADDR or MASTER_PORT is not.

    Example:
        >>> launch_from_torch(seed=0, verbose=False)
        >>> model = ShardedModel(torch.nn.Linear(8, 8))  # on all ranks of `torchrun`, or on one
    """
    global _config
    _config = config
    if seed is not None:
        torch.manual_seed(seed)
    if was_launched():
        _join(backend, seed, rank_timeout, verbose)


def launch_from_slurm(
    config: Any = None,
    host: str | None = None,
    port: int | None = None,
    *,
    backend: str | None = None,
    seed: int | None = 1024,
    rank_timeout: float = RANK_TIMEOUT_S,
    verbose: bool = True,
) -> None:
    """Join the ranks that `srun` has started, one per task. Collective.

    Args:
        config: as in `launch_from_torch`.
        host: name or address of the machine of rank 0. None: MASTER_ADDR, else the first node of the job step.
        port: on it, free. None: MASTER_PORT, else one that follows from the numbers of job and step, so that jobs which
            share a machine do not meet.
        backend, seed, rank_timeout, verbose: as in `launch_from_torch`.

    Raises RuntimeError outside a job step of Slurm, and what `launch_from_torch` raises.

    Example:
        >>> launch_from_slurm({"stage": 3, "device_memory": "20GiB"}, seed=0)  # doctest: +SKIP
    """
    global _config
    _config = config
    given = os.environ
    missing = [name for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID") if name not in given]
    if missing:
        raise RuntimeError(f"launch_from_slurm(): {', '.join(missing)} not set: start the script with srun")
    # A job step may have fewer tasks and nodes than its job.
    nodes = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST", "")
    of_job = _FIRST_PORT + (int(given.get("SLURM_JOB_ID", 0)) + int(given.get("SLURM_STEP_ID", 0))) % _NUM_PORTS
    # `init_process_group()` reads these variables.
    given.update(
        RANK=given["SLURM_PROCID"],
        WORLD_SIZE=given.get("SLURM_STEP_NUM_TASKS", given["SLURM_NTASKS"]),
        LOCAL_RANK=given["SLURM_LOCALID"],
        MASTER_ADDR=host or given.get("MASTER_ADDR") or _first_node(nodes),
        MASTER_PORT=given.get("MASTER_PORT", str(of_job)) if port is None else str(port),
    )
    if seed is not None:
        torch.manual_seed(seed)
    _join(backend, seed, rank_timeout, verbose)


def _first_node(nodes: str) -> str:
    """The first name of a list such as "gpu[003-006,9],login1", or this machine for an empty one."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0] or "localhost"
    return head + re.split("[-,\\]]", rest)[0]


def _join(backend: str | None, seed: int | None, rank_timeout: float, verbose: bool, why: str = "") -> None:
    """Make the process group of the ranks that the environment names. why: what else rank 0 says of it."""
    if dist.is_initialized():
        raise UnsupportedError("a process group exists already: launch_from_...() or init_process_group(), not both")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpus = torch.accelerator.is_available()
    if has_gpus:
        # Otherwise every rank of this machine would use its first device.
        torch.accelerator.set_device_index(_device_index(local_rank, torch.accelerator.device_count()))
    backend = _backend_of(current_device()) if backend is None else backend
    _init_process_group(backend, timedelta(seconds=rank_timeout))
    atexit.register(_leave)
    if verbose:
        get_dist_logger().info(
            f"{dist.get_world_size()} ranks, {backend}, on {current_device()}; "
            f"{why or ('not seeded' if seed is None else f'seed {seed}')}",
            ranks=[0],
        )


def _init_process_group(backend: str, timeout: timedelta) -> None:
    """As torch does it, with other keys for ranks that torchrun starts again.

    torch 2.13 has them meet in the store of those before them. They may read an address there that nobody listens at
    any more: "Gloo connectFullMesh failed", in most of the restarts that were tried with `--standalone`.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(f"gemini/attempt_{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _backend_of(device: torch.device) -> str:
    """The backends for `init_process_group`: gloo, and beside it what torch has for the kind of accelerator."""
    # gloo carries what lies on the CPU: control words, and weights of a model under construction.
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _device_index(local_rank: int, num_devices: int) -> int:
    """This rank's device: its own, or the only one where a launcher shows every rank one GPU (SLURM)."""
    if num_devices == 1:
        return 0
    if local_rank >= num_devices:
        raise RuntimeError(
            f"local rank {local_rank} has no device: this machine has {num_devices}. Start at most as many ranks on it "
            "(torchrun --nproc-per-node, srun --ntasks-per-node), or show each rank one (srun --gpus-per-task=1)"
        )
    return local_rank


def _leave() -> None:
    """The end of the script: nobody closes connections that another rank still reads from."""
    # Python keeps an uncaught exception in `sys.last_value`. A rank that failed does not wait: the others may be in a
    # collective that it will never join, and so would not leave.
    if not dist.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    # The ranks count themselves in the store. A barrier would not end if one of them was killed.
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + _LEAVE_S
    try:
        num_left = store.add("gemini/left", 1)
        while num_left < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            # `add` returns the number, which 0 leaves as it is.
            num_left = store.add("gemini/left", 0)
        dist.destroy_process_group()
    except RuntimeError:  # the store's rank has ended first
        return
