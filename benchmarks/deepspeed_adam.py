"""`DeepSpeedCPUAdam`, the peer, in a long-lived process of its own python, which runs a turn when it is told to.

Its environment (deepspeed 0.19.8 from its source distribution, torch 2.13.0, gcc 12.2; the kernel is compiled by ninja
with g++ at its first use, which takes 40 s):

    python -m venv .venv-deepspeed
    .venv-deepspeed/bin/pip install torch==2.13.0 numpy==2.4.6 setuptools wheel ninja==1.13.2 py-cpuinfo==9.0.0
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 .venv-deepspeed/bin/pip install --no-build-isolation deepspeed==0.19.8
    python -m benchmarks.adam --deepspeed .venv-deepspeed/bin/python

One process for each number of threads: the kernel's OpenMP need not be torch's, so only OMP_NUM_THREADS reaches both.
This module is imported on both sides, and on theirs there is only torch.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_S = 600.0  # the first start compiles
TURN_S = 120.0
CALLS = 3

TRAFFIC_BYTES = {"bf16 parameters (no master)": 22, "fp32 parameters": 28, "fp32 master, copied to bf16": 34}
"""Name of the case -> bytes a parameter that cross the memory bus."""


class DeepSpeedFailed(RuntimeError):
    """The process ended, or said nothing in time; the message ends with its last output."""


def environment(python: str) -> dict[str, str]:
    """With that python's own ninja on PATH."""
    folder = str(Path(python).absolute().parent)
    return {"PATH": folder + os.pathsep + os.environ.get("PATH", ""), "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


class DeepSpeedAdam:
    """The parent's handle; close it."""

    def __init__(self, python: str, numel: int, num_threads: int, log: Path) -> None:
        self._log = log
        command = [str(Path(python).absolute()), "-m", "benchmarks.deepspeed_adam", "--numel", str(numel)]
        variables = os.environ | environment(python) | {"OMP_NUM_THREADS": str(num_threads)}
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self.facts: dict[str, Any] = self._answer(START_S)

    def turn(self, case: str) -> float:
        """Seconds of one update."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"case": case}).encode() + b"\n")
        self._process.stdin.flush()
        return float(self._answer(TURN_S)["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(timeout_s) else b""
        if not line:
            if self._process.poll() is None:
                self._process.kill()
            code = self._process.wait()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise DeepSpeedFailed(f"DeepSpeed's process gave no answer (exit code {code}):\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _updates(numel: int) -> dict[str, Callable[[], object]]:
    """The child's cases; gradients and moments as ours have them."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.empty(numel).normal_(generator=generator) for _ in range(2))
    exp_avg, exp_avg_sq = grad * 0.1, grad.square() * 0.001

    def adam(dtype: torch.dtype) -> tuple[torch.nn.Parameter, Any]:
        parameter = torch.nn.Parameter(weight.to(dtype))
        parameter.grad = grad.to(dtype)
        optimizer = DeepSpeedCPUAdam(
            [parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fp32_optimizer_states=True
        )
        optimizer.state[parameter] = {"step": 1000, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        return parameter, optimizer

    _, of_bf16 = adam(torch.bfloat16)
    master, of_fp32 = adam(torch.float32)
    half = torch.empty(numel, dtype=torch.bfloat16).fill_(1.0)

    def step_and_copy() -> None:
        of_fp32.step()
        half.copy_(master.detach())

    return dict(zip(TRAFFIC_BYTES, (of_bf16.step, of_fp32.step, step_and_copy)))


def main() -> None:
    """The child's side: JSON lines from standard input, answers to what standard output was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, required=True)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # deepspeed and ninja print
    import deepspeed
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    updates = _updates(parser.parse_args().numel)
    print(json.dumps({"deepspeed": deepspeed.__version__, "torch": torch.__version__}), file=answers)
    for line in sys.stdin:
        call = updates[json.loads(line)["case"]]
        call()
        times = []
        for _ in range(CALLS):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        print(json.dumps({"seconds": statistics.median(times)}), file=answers)


if __name__ == "__main__":
    main()
