"""One training step of this checkout beside that of another one, such as the commit before a change.

    git worktree add ../before COMMIT && make -C ../before setup
    python -m benchmarks.before_after ../before                  # four rows; some ten minutes
    python -m benchmarks.before_after ../before --tiny           # seconds, no figures to quote

Both checkouts train the same 26 M GPT-2 in processes of their own, one thread a rank, and take turns case by case:
while one works the other sleeps. What counts is the median of the ratios within each round; losses must have the same
bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from benchmarks.launch import ROOT, rank_environment
from benchmarks.rounds import Spread, StepTime, paired_ratio, part_of, slowest_rank

WARM_UP = 3
TURN_TIMEOUT_S = 300
CASES: dict[int, dict[str, float | None]] = {
    1: {"1 rank, everything fits": None, "1 rank, half": 8.0},
    2: {"2 ranks, no reshard budget": 10.5, "2 ranks, reshard budget": 8.8},
}
"""World size -> case -> bytes of model data a parameter on each rank's device; those of two ranks are FSDP2's peaks."""
NUM_PARAMETERS = {False: 26_334_208, True: 403_648}
LIMIT = 1.02


class Group:
    """The ranks of one checkout and one world size."""

    def __init__(self, name: str, checkout: Path, world_size: int, tiny: bool, folder: Path) -> None:
        self.name, self.world_size = name, world_size
        self._turns = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._rendezvous = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._num_turns = 0
        self._folder = folder
        budgets = {
            case: None if per_parameter is None else int(per_parameter * NUM_PARAMETERS[tiny])
            for case, per_parameter in CASES[world_size].items()
        }
        script = str(ROOT / "benchmarks" / "turn_rank.py")
        command = [str(checkout / ".venv" / "bin" / "python"), script, name, json.dumps(budgets), str(int(tiny))]
        self._processes = []
        for rank in range(world_size):
            environment = rank_environment(rank, world_size, self._rendezvous.port)
            environment |= {"TURNS_PORT": str(self._turns.port), "PYTHONPATH": str(checkout)}
            with open(folder / f"{name}.{rank}.log", "wb") as log:
                self._processes.append(
                    subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT)
                )

    def take_turn(self, case: str, first_step: int, steps: int) -> tuple[list[StepTime], list[float]]:
        """Times of the slowest rank and rank 0's losses. Raises RuntimeError with what a rank said that ended."""
        number, self._num_turns = self._num_turns, self._num_turns + 1
        turn = {"case": case, "first_step": first_step, "steps": steps}
        self._turns.set(f"{self.name}/{number}", json.dumps(turn))
        by_rank, losses = [], []
        for rank in range(self.world_size):
            times, its_losses = json.loads(self._answer(f"{self.name}/{number}/{rank}"))
            by_rank.append([StepTime(*time) for time in times])
            losses.append(its_losses)
        return slowest_rank(by_rank), losses[0]

    def _answer(self, key: str) -> bytes:
        deadline = time.monotonic() + TURN_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._turns.check([key]):
                return self._turns.get(key)
            ended = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
            if ended:
                log = (self._folder / f"{self.name}.{ended[0]}.log").read_text(errors="replace")
                raise RuntimeError(f"rank {ended[0]} of {self.name} ended:\n{log[-3000:]}")
            time.sleep(0.02)
        raise RuntimeError(f"{self.name} did not answer within {TURN_TIMEOUT_S} s")

    def stop(self) -> None:
        """End the ranks in an orderly way. Raises RuntimeError if one fails."""
        self._turns.set(f"{self.name}/{self._num_turns}", "null")
        codes = [process.wait(60) for process in self._processes]
        if any(codes):
            raise RuntimeError(f"{self.name} ended with {codes}")

    def kill(self) -> None:
        """Whatever still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def groups(before: Path, world_size: int, tiny: bool) -> Iterator[dict[str, Group]]:
    """The ranks of both checkouts; no process is left behind."""
    started: dict[str, Group] = {}
    with tempfile.TemporaryDirectory(prefix="before-after-") as folder:
        try:
            for name, checkout in (("before", before), ("after", ROOT)):
                started[name] = Group(name, checkout, world_size, tiny, Path(folder))
            yield started
            for group in started.values():
                group.stop()
        finally:
            for group in started.values():
                group.kill()


def measure(before: Path, world_size: int, rounds: int, steps: int, tiny: bool) -> dict[str, dict[str, list[StepTime]]]:
    """Case -> checkout -> step times. Raises RuntimeError if a loss of the two differs in a bit."""
    found: dict[str, dict[str, list[StepTime]]] = {case: {"before": [], "after": []} for case in CASES[world_size]}
    with groups(before, world_size, tiny) as both:
        for number in range(-1, rounds):
            count = WARM_UP if number < 0 else steps
            first_step = 0 if number < 0 else WARM_UP + number * steps
            for case in CASES[world_size]:
                order = ("before", "after") if number % 2 else ("after", "before")
                losses = {}
                for name in order:
                    times, losses[name] = both[name].take_turn(case, first_step, count)
                    if number >= 0:
                        found[case][name] += times
                if losses["before"] != losses["after"]:
                    raise RuntimeError(f"{case}: other losses: {losses}")
    return found


def main(
    before: Annotated[Path, typer.Argument(help="The other checkout, with a .venv of its own (make setup).")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after warm-up.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a case in a round.")] = 2,
    tiny: Annotated[bool, typer.Option("--tiny", help="A 0.4 M model: seconds, to see that it runs.")] = False,
    ranks: Annotated[str, typer.Option(help="World sizes: 1, 2 or both.")] = "both",
    out: Annotated[Path | None, typer.Option(help="Write what was measured as JSON.")] = None,
) -> None:
    """Time one training step of this checkout beside that of another one."""
    before = before.resolve()
    if not (before / ".venv" / "bin" / "python").exists():
        raise typer.BadParameter(f"{before} has no .venv/bin/python: run make setup there", param_hint="BEFORE")
    if ranks not in ("1", "2", "both"):
        raise typer.BadParameter(f"must be 1, 2 or both, found {ranks!r}", param_hint="--ranks")
    console = Console(width=150)
    table = Table(title=f"after / before, median of the ratios of {rounds * steps} steps (quartiles)")
    for column in ("case", "step", "forward+backward", "optimizer", "CPU time", f"≤ {LIMIT}"):
        table.add_column(column)
    result: dict[str, Any] = {"benchmark": "before_after", "torch": torch.__version__, "tiny": tiny, "cases": {}}
    for world_size in (1, 2) if ranks == "both" else (int(ranks),):
        try:
            found = measure(before, world_size, rounds, steps, tiny)
        except RuntimeError as failure:
            console.print(str(failure), style="red", markup=False)
            raise typer.Exit(1) from None
        for case, times in found.items():
            ratios = {
                part: paired_ratio(part_of(times["after"], part), part_of(times["before"], part))
                for part in ("step_s", "forward_backward_s", "optimizer_s", "cpu_s")
            }
            verdict = "met" if ratios["step_s"].median <= LIMIT else "MISSED"
            table.add_row(case, *(spread.text(digits=3) for spread in ratios.values()), verdict)
            result["cases"][case] = {
                "ratios": {part: asdict(spread) for part, spread in ratios.items()},
                "step_s": {name: asdict(Spread.of(part_of(each, "step_s"))) for name, each in times.items()},
            }
    console.print(table)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(typer.run(main))
