"""What `benchmarks.adam` measured: figures of every case, and the targets that they are held against."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.adam_cases import BANDWIDTH, OURS, PEER, Case, Group
from benchmarks.rounds import Spread, paired_ratio


@dataclass
class Measured:
    """A group's cases and the seconds of their turns, round by round."""

    group: Group
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, case: Case, seconds: float) -> None:
        self.seconds.setdefault(case.name, []).append(seconds)

    def cases(self, role: str) -> list[Case]:
        return [case for case in self.group.cases if case.role == role]

    @property
    def bandwidth(self) -> Case:
        """The loop with the best median: one for all rounds, as the best of each round would be the luckiest."""
        return min(self.cases(BANDWIDTH), key=lambda case: Spread.of(self.seconds[case.name]).median)

    @property
    def ours(self) -> Case | None:
        """The machine's best level, which is what is used; None where the kernels were not built."""
        return next(iter(self.cases(OURS)), None)

    def per_second(self, case: Case, amount: float) -> Spread:
        """`amount` of a call, per second."""
        return Spread.of([amount / seconds for seconds in self.seconds[case.name]])

    def speed_ratio(self, case: Case, other: Case) -> Spread:
        """How many times the elements per second of `other`, within each round."""
        ratio = case.num_elements / other.num_elements
        return paired_ratio([ratio * s for s in self.seconds[other.name]], self.seconds[case.name])

    def share_of_bandwidth(self, case: Case) -> Spread:
        """Its own bytes per second against the best loop's, within each round."""
        best = self.bandwidth
        ratio = case.traffic_bytes / best.traffic_bytes
        return paired_ratio([ratio * s for s in self.seconds[best.name]], self.seconds[case.name])


@dataclass(frozen=True)
class Verdict:
    """`case` must reach `limit` times what `base` does, and should reach `goal`; `ratio` is the spread over rounds."""

    group: str
    case: str
    base: str
    limit: float
    goal: float | None
    ratio: Spread

    @property
    def met(self) -> bool:
        return self.ratio.median >= self.limit

    def text(self) -> str:
        verdict = f"[green]met (≥ {self.limit:g})" if self.met else f"[red]MISSED (≥ {self.limit:g})"
        if self.goal is None:
            return verdict
        return f"{verdict}, goal {self.goal:g}{'' if self.ratio.median >= self.goal else ' not'} reached"


@dataclass(frozen=True)
class Target:
    """Of one kind of work: our best level against the bandwidth, or against a peer's speed."""

    work: str
    base: str  # BANDWIDTH, or the name of a peer's case
    limit: float
    goal: float | None = None
    most_threads: int | None = None


TARGETS = (
    Target("split, bf16 gradient", BANDWIDTH, 0.95, most_threads=2),
    Target("split, bf16 gradient", "torch: cast, fused, cast (fresh copies)", 3.0),
    Target("split, bf16 gradient", "torch: cast, fused, cast (kept copies)", 3.0),
    Target("split, bf16 gradient", "DeepSpeedCPUAdam: bf16 parameters (no master)", 1.1),
    Target("split, bf16 gradient", "DeepSpeedCPUAdam: fp32 master, copied to bf16", 1.1),
    Target("norm, fp32", BANDWIDTH, 0.5, goal=0.9),
    Target("norm, bf16", BANDWIDTH, 0.5, goal=0.9),
)


def verdicts(found: list[Measured]) -> list[Verdict]:
    """What can be judged: nothing without our kernels, nothing about peers that did not run."""
    result = []
    for measured in found:
        ours = measured.ours
        if ours is None:
            continue
        for target in TARGETS:
            if target.work != measured.group.work or measured.group.num_threads > (target.most_threads or 10**9):
                continue
            if target.base == BANDWIDTH:
                ratio = measured.share_of_bandwidth(ours)
                base = measured.bandwidth.name
            else:
                peers = [case for case in measured.cases(PEER) if case.name == target.base]
                if not peers:
                    continue
                ratio = measured.speed_ratio(ours, peers[0])
                base = target.base
            result.append(Verdict(measured.group.name, ours.name, base, target.limit, target.goal, ratio))
    return result


def show(console: Console, found: list[Measured]) -> None:
    """A table a group, then the targets."""
    for measured in found:
        console.print(_group_table(measured))
    table = Table(title="median of the ratios within each round (quartiles)")
    for column in ("work", "case / base", "ratio", "target"):
        table.add_column(column)
    for verdict in verdicts(found):
        name = f"{verdict.case} / {verdict.base}"
        table.add_row(verdict.group, name, verdict.ratio.text(digits=3), verdict.text())
    if table.row_count:
        console.print(table)
    else:
        console.print("No target was judged: our kernels are not built here (pip install -e . builds them).")


def _group_table(measured: Measured) -> Table:
    rounds = len(next(iter(measured.seconds.values())))
    table = Table(title=f"{measured.group.name}; {rounds} rounds, median (quartiles)")
    table.add_column("case")
    for column in ("M elements/s", "bytes each", "GB/s", "of the bandwidth"):
        table.add_column(column, justify="right")
    best = measured.bandwidth
    for case in measured.group.cases:
        share = "best loop" if case is best else measured.share_of_bandwidth(case).text(digits=3)
        table.add_row(
            f"[bold]{case.name}" if case is best else case.name,
            measured.per_second(case, case.num_elements / 1e6).text(digits=0),
            f"{case.traffic_bytes / case.num_elements:g}",
            measured.per_second(case, case.traffic_bytes / 1e9).text(),
            share,
        )
    return table


def as_json(found: list[Measured]) -> dict[str, Any]:
    """Everything that was measured, round by round."""
    return {
        "groups": [
            {
                "work": measured.group.work,
                "num_threads": measured.group.num_threads,
                "best_loop": measured.bandwidth.name,
                "cases": {
                    case.name: {
                        "role": case.role,
                        "num_elements": case.num_elements,
                        "traffic_bytes": case.traffic_bytes,
                        "elements_per_s": asdict(measured.per_second(case, case.num_elements)),
                        "bytes_per_s": asdict(measured.per_second(case, case.traffic_bytes)),
                        "share_of_bandwidth": asdict(measured.share_of_bandwidth(case)),
                        "rounds_s": measured.seconds[case.name],
                    }
                    for case in measured.group.cases
                },
            }
            for measured in found
        ],
        "verdicts": [asdict(verdict) | {"met": verdict.met} for verdict in verdicts(found)],
    }
