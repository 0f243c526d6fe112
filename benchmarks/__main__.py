"""`python -m benchmarks`: the benchmarks that a machine without a GPU can run.

    python -m benchmarks               # all of them, results in benchmarks/results/
    python -m benchmarks --list
    python -m benchmarks train_step    # some
    python -m benchmarks --tiny        # seconds each, to see that they run

Each one can also be started alone: `python -m benchmarks.train_step --help`.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from benchmarks.launch import ROOT

CPU_BENCHMARKS = {
    "train_step": "one training step: ours beside plain PyTorch and beside FSDP2 at the same bytes (about 4 minutes)",
    "adam": "Adam on the CPU: our kernels beside the machine's bandwidth and torch's kernels (about 4 minutes)",
    "state_loss": "the loss with moments of 8 and 16 bits beside fp32 ones, three seeds (about 3 minutes)",
    "bytes_per_parameter": "what one more parameter costs in memory: ours and FSDP2 (about 5 minutes)",
    "stages": "bytes of a rank by ZeRO stage, beside the formulas, on 2 and 4 ranks (about 2 minutes)",
    "resident_memory": "the same by the system's account, as a user has it: ours, 8 processes (about 2 minutes)",
    "tiny_operators": "1,000 tiny operators, nearly all calls: ours beside plain PyTorch and DDP (half a minute)",
    "collective_cost": "what launching a collective costs beside its bytes, on two ranks (a quarter of a minute)",
    "engine_overhead": "a step through the Engine beside the same by hand, for two sizes of GPT-2 (a minute)",
    "checkpoint": "saving and loading beside the disk's rate, torch.save and DCP; saving beside training (2 minutes)",
    "same_bits": "no bit depends on where the state rests: every policy and budget on 1, 2, 4 ranks (half an hour)",
    "modelled_time": "modelled step times beside measured ones, on one rank and on two (a minute)",
    "step_profile": "where a step of two ranks spends its time (half a minute)",
}
"""Name of the module -> what it measures. Each takes --save and --tiny."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which ones; all if none is given.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Say what there is and stop.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="The smallest sizes.")] = False,
) -> None:
    """Run the CPU benchmarks. The GPU's are one command of their own: bash benchmarks/gpu.sh"""
    unknown = [name for name in names or () if name not in CPU_BENCHMARKS]
    if unknown:
        raise typer.BadParameter(f"no benchmark is called {unknown[0]!r}; there are: {', '.join(CPU_BENCHMARKS)}")
    if list_only:
        for name, what in CPU_BENCHMARKS.items():
            typer.echo(f"{name:20} {what}")
        return
    failed = []
    for name in names or CPU_BENCHMARKS:
        typer.echo(f"== {name}: {CPU_BENCHMARKS[name]}", err=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--save", *(["--tiny"] if tiny else [])]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
