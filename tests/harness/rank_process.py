"""A rank's side of tests/harness/ranks.py: the process that runs cases and answers through a pipe."""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.meshes import kept_groups
from tests.harness.seed import seed

COLLECTIVE_TIMEOUT_S = 60.0


class RankError(RuntimeError):
    """A rank died, or raised something that cannot be sent over a pipe."""


def run_rank(pipe: Connection, setup: tuple[int, int, str, bool, bool, dict[str, str]]) -> None:
    rank, world_size, log_path, serve, init_group, variables = setup
    os.environ.update(variables)
    log = open(log_path, "w", buffering=1)  # noqa: SIM115  (open for the life of the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it kills what it started
    torch.set_num_threads(1)
    if init_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        dist.barrier()  # the connections exist before the first case is timed
    if not serve:
        sys.exit(_one_case(pipe, rank, world_size))
    _answer(pipe, True, None)
    while (call := _receive(pipe)) is not None:
        _run_case(pipe, call, rank, world_size, barrier=True)
    # gloo's teardown can deadlock on the GIL when ranks leave at different times: leave together
    dist.barrier()
    dist.destroy_process_group()


def _receive(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:  # the parent is gone
        os._exit(3)


def _one_case(pipe: Connection, rank: int, world_size: int) -> int:
    ok = _run_case(pipe, _receive(pipe), rank, world_size, barrier=False)
    if ok and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a peer that died is this kind of case's business
            dist.barrier()
            dist.destroy_process_group()
    return 0 if ok else 1


def _destroy_groups() -> None:
    """Those of models that a case did not close: each has threads that gloo wakes a hundred times a second."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group not in kept_groups:
            dist.destroy_process_group(group)


def _run_case(pipe: Connection, call: Any, rank: int, world_size: int, barrier: bool) -> bool:
    name, args, kwargs = call
    seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)  # Lightning's launchers give it all processors
    try:
        module, _, qualname = name.partition(":")
        case: Any = importlib.import_module(module)
        for part in qualname.split("."):
            case = getattr(case, part)
        result = case(rank, world_size, *args, **kwargs)
        if barrier:  # a rank with one collective too many is found in its own case, not in the next one
            dist.barrier()
            _destroy_groups()
    except BaseException as error:
        trace = traceback.format_exc()
        sys.stderr.write(trace)
        _answer(pipe, False, error, trace)
        return False
    _answer(pipe, True, result)
    del result
    gc.collect()
    return True


def _answer(pipe: Connection, ok: bool, value: Any, trace: str = "") -> None:
    try:
        payload = pickle.dumps(value)
    except Exception as problem:
        ok, trace = False, trace or f"the result cannot be sent: {problem}"
        payload = pickle.dumps(RankError(trace.strip().splitlines()[-1]))
    with contextlib.suppress(OSError):  # the parent gave up already
        pipe.send_bytes(pickle.dumps((ok, payload, trace)))
