"""Ranks of a benchmark: processes of their own, one thread each, with a time limit and checked exit codes.

`run_ranks("package.module:function", 2, options, timeout_s)` calls `function(rank, world_size, **options)` in every
rank and returns their results, which travel as JSON, in rank order. Several ranks find a gloo process group made; one
rank has none. The parent serves the rendezvous store itself, as torchrun's agent does, so no port is guessed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10.0  # after one rank failed, the others may still say why
COLLECTIVE_TIMEOUT = timedelta(seconds=120)


class RankFailed(RuntimeError):
    """A rank exited with another code than 0, or did not end in time; the message ends with its last output."""


def run_ranks(
    function: str,
    world_size: int,
    options: dict[str, Any],
    timeout_s: float,
    *,
    python: str = sys.executable,
    variables: dict[str, str] | None = None,
) -> list[Any]:
    """Results in rank order, of ranks that run in `python`, with `variables` in their environment.

    Raises RankFailed; no process is left behind in any case.
    """
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                command = [python, "-m", "benchmarks.launch", function, json.dumps(options), name]
                with open(folder / f"{rank}.log", "wb") as log:
                    environment = rank_environment(rank, world_size, store.port) | (variables or {})
                    ranks.append(
                        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
                    )
            _wait(ranks, timeout_s, folder, function)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float, folder: Path, function: str) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in ranks):
        if any(process.poll() not in (None, 0) for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    codes = [process.poll() for process in ranks]
    if all(code == 0 for code in codes):
        return
    tails = []
    for rank, code in enumerate(codes):
        if code != 0:
            lines = (folder / f"{rank}.log").read_text(errors="replace").splitlines()[-30:]
            ended = f"did not end within {timeout_s:g} s" if code is None else f"exited with {code}"
            tails.append(f"rank {rank} of {len(ranks)} {ended}:\n" + "\n".join(lines))
    raise RankFailed(f"{function}: " + "\n".join(tails))


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set, and one thread."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client of the parent's store
        "OMP_NUM_THREADS": 1,
        "TOKENIZERS_PARALLELISM": "false",
    }
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return os.environ | {name: str(value) for name, value in variables.items()}


def main() -> None:
    """A rank's side."""
    function, options, folder = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(rank, world_size, **json.loads(options))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    if world_size > 1:
        # gloo's teardown can deadlock on the GIL when ranks leave at different times: leave together
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
