"""Where the state rests decides no bit: one small GPT-2, trained at every budget, by every policy, on 1, 2 and 4 ranks.

    python -m benchmarks.same_bits                                # the whole matrix; some 40 minutes
    python -m benchmarks.same_bits --only "ranks=2 dtype=bf16"    # the cases that have these values
    python -m benchmarks.same_bits --tiny                         # every pair of two options' values, 5 steps
    python -m benchmarks.same_bits --save                         # writes benchmarks/results/same_bits.md

Compared are the losses of every rank, step and micro-batch, and `gemini.state_hash` of weights, moments and masters
after the last step: with plain PyTorch on one rank in fp32, elsewhere with a model of which nothing is sharded and
nothing moves. Exits with 1 if a bit differs or a case fails.
"""

from __future__ import annotations

import datetime
import subprocess
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
import typer

from benchmarks.launch import ROOT
from benchmarks.same_bits_cases import (
    BUDGETS,
    OPTIONS,
    POLICIES,
    Arithmetic,
    Bits,
    Case,
    Moved,
    Refused,
    Trained,
    is_allowed,
    matrix,
    reference_on,
    train_on,
)
from tests.harness.pairwise import sampled_pairs
from tests.harness.ranks import RankPool

RESULT = ROOT / "benchmarks" / "results" / "same_bits.md"
CASE_TIMEOUT_S = 300.0


@dataclass
class Found:
    """What all cases of the matrix had to say.

    Args:
        same: cases with the bits of their reference, and what moved in them.
        refused: cases whose budget is less than their policy needs, and the bytes that it needs.
        wrong: cases with other bits, or that failed, in words.
        num_references: trainings that others were compared with.
    """

    same: dict[Case, Moved] = field(default_factory=dict)
    refused: dict[Case, Refused] = field(default_factory=dict)
    wrong: dict[Case, str] = field(default_factory=dict)
    num_references: int = 0

    def note(self, case: Case, by_rank: Sequence[Trained | Refused], wanted: Sequence[Bits]) -> None:
        """What the ranks say of a case, and what they should."""
        for rank, (done, reference) in enumerate(zip(by_rank, wanted, strict=True)):
            if isinstance(done, Refused):
                self.refused[case] = done
            elif done.bits != reference:
                self.wrong[case] = f"rank {rank}: {_difference(done.bits, reference)}"
                return
            elif rank == 0:
                self.same[case] = done.moved
        assert (case in self.same) + (case in self.refused) == 1, f"ranks differ in whether {case} fits"


def _difference(bits: Bits, wanted: Bits) -> str:
    for place, (ours, theirs) in enumerate(zip(bits.losses, wanted.losses, strict=True)):
        if ours != theirs:
            return f"loss {place} of {len(bits.losses)} is {ours}, and {theirs} in the reference"
    return "losses are equal, the state after the last step is not"


def pairs(options: dict[str, list[Any]]) -> list[Case]:
    """Cases in which every pair of two options' values occurs, on few ranks first."""
    cases = [Case(**values) for values in sampled_pairs(options, is_allowed)]
    return sorted(cases, key=lambda case: case.ranks)


def compare(cases: list[Case], steps: int, pool: RankPool) -> Iterator[tuple[Case, Found]]:
    """After each case, all that was found so far. Ranks are started once for each world size."""
    found, wanted = Found(), dict[Arithmetic, list[Bits]]()
    for case in cases:
        arithmetic = case.arithmetic
        if arithmetic not in wanted:
            wanted[arithmetic] = _on_ranks(pool, reference_on, arithmetic, steps)
            found.num_references += 1
        try:
            by_rank = _on_ranks(pool, train_on, case, steps)
        except Exception as error:  # a finding of this benchmark, whatever it is; the other cases go on
            found.wrong[case] = "".join(traceback.format_exception_only(error)).strip()
        else:
            found.note(case, by_rank, wanted[arithmetic])
        yield case, found


def _on_ranks(pool: RankPool, function: Any, how: Arithmetic, steps: int) -> list[Any]:
    if how.ranks == 1:
        return [function(0, 1, asdict(how), steps)]
    return pool(how.ranks).run(function, asdict(how), steps, timeout_s=CASE_TIMEOUT_S)


def table(found: Found) -> list[str]:
    """A line for each number of ranks and policy, in columns of budgets: how many cases have the same bits."""
    lines = [
        f"| ranks | policy | {' | '.join(BUDGETS)} |",
        f"|---|---|{'---|' * len(BUDGETS)}",
    ]
    for ranks in OPTIONS["ranks"]:
        for policy in POLICIES:
            cells = [_cell(found, f"ranks={ranks}", f"policy={policy}", f"budget={budget}") for budget in BUDGETS]
            if any(cells):
                lines.append(f"| {ranks} | {policy} | {' | '.join(cells)} |")
    return lines


def _cell(found: Found, *words: str) -> str:
    same, refused, wrong = (
        sum(case.has(words) for case in cases) for cases in (found.same, found.refused, found.wrong)
    )
    parts = [
        f"{same} same" if same else "",
        f"{refused} refused" if refused else "",
        f"**{wrong} DIFFER**" * bool(wrong),
    ]
    return ", ".join(part for part in parts if part)


def commit_here() -> str:
    """Short; to be asked before the cases run, as a checkout may move on meanwhile."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip()


def report(found: Found, steps: int, seconds: float, command: str, commit: str) -> list[str]:
    """The page that is committed."""
    verdict = f"{len(found.wrong)} differ or failed" if found.wrong else "all have the same bits"
    moved, num_trained = list(found.same.values()), len(found.same) + len(found.wrong)
    num_chunks = [each.num_chunks for each in moved] or [0]
    paragraphs = [
        "# The same bits wherever the state rests",
        f"`{command}` on {datetime.date.today()} at commit {commit}: {seconds / 60:.0f} minutes, torch "
        f"{torch.__version__}, CPU, gloo.",
        f"{num_trained} trainings of {steps} steps against {found.num_references} references: **{verdict}**. Compared: "
        "the losses of every rank, step and micro-batch, and `state_hash` of weights, moments and masters at the end.",
        f"In them {sum(each.fetches for each in moved)} payloads were brought into slots, "
        f"{sum(each.ahead for each in moved)} of these ahead of their use, and "
        f"{sum(each.evictions for each in moved)} left a slot for another one. "
        f"{sum(each.host_bytes > 0 for each in moved)} trainings had state on the host. The model had "
        f"{min(num_chunks)} to {max(num_chunks)} chunks.",
        "Each cell counts combinations of dtype (fp32, bf16, fp16), clipping (off, on), micro-batches (1, 3), chunk "
        "size (searched, small) and, on several ranks, payloads gathered ahead (0, 1, 4). One rank has all of them. "
        "Several ranks have every dtype with every number of payloads ahead, and with each of these some of the eight "
        "combinations of clipping, micro-batches and chunk size: two on 2 ranks, so that the values of any four "
        "options occur together, and one on 4 ranks, where those of any three do. A budget is a fraction of the model "
        "data with everything resident, or the policy's own minimum. Refused: the policy needs more than this budget, "
        "which the error says with the bytes. There is no disk tier yet.",
        "\n".join(table(found)),
        *(f"{case}: {words}" for case, words in found.wrong.items()),
    ]
    return "\n\n".join(paragraphs).splitlines()


def main(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Cases that have all these values, as 'ranks=2 policy=auto'; may be given several times."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 20,
    tiny: Annotated[bool, typer.Option("--tiny", help="Pairs of values only, and 5 steps.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/same_bits.md.")] = False,
) -> None:
    """Train every case and compare its bits with those of its reference."""
    cases = pairs(OPTIONS) if tiny else matrix()
    steps = min(steps, 5) if tiny else steps
    wanted = [words.split() for words in only or [""]]
    cases = [case for case in cases if any(case.has(words) for words in wanted)]
    if not cases:
        values = "; ".join(f"{name}={'|'.join(map(str, values))}" for name, values in OPTIONS.items())
        raise typer.BadParameter(f"no case has these values; there are: {values}", param_hint="--only")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pool, started, found, commit = RankPool(), time.monotonic(), Found(), commit_here()
    try:
        for number, (case, found) in enumerate(compare(cases, steps, pool), 1):
            if case in found.wrong:
                typer.echo(f"WRONG {case}: {found.wrong[case]}", err=True)
            if number % 20 == 0 or number == len(cases):
                seconds = time.monotonic() - started
                typer.echo(
                    f"{number:5} of {len(cases)} cases, {seconds:.0f} s, {len(found.wrong)} wrong; {case}", err=True
                )
    finally:
        pool.stop()
    options = [f"--only {words!r}" for words in only or ()] + ["--tiny"] * tiny
    command = " ".join(["python -m benchmarks.same_bits", *options, f"--steps {steps}"])
    lines = report(found, steps, time.monotonic() - started, command, commit)
    typer.echo("\n".join(lines))
    if save:
        path = RESULT.with_stem("same_bits_tiny") if tiny else RESULT
        path.write_text("\n".join(lines) + "\n")
        typer.echo(f"written: {path.name}")
    if found.wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
