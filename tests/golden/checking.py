"""Compares what cases give now with what was recorded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.golden.cases import Case
from tests.golden.recording import Recording, differences, what_computes
from tests.golden.running import on_ranks
from tests.harness.ranks import RankPool


@dataclass
class Verdict:
    """Of a number of cases."""

    with_recorded_bits: int = 0
    with_siblings: int = 0
    found: dict[Case, list[str]] = field(default_factory=dict)  # lines, by case that differs

    def __str__(self) -> str:
        """Which comparisons were made, then case by case what was found."""
        count = self.with_recorded_bits + self.with_siblings
        words = [f"golden: {count} cases, {len(self.found)} differ", "counts of all were compared with recorded ones"]
        if self.with_recorded_bits:
            words.append(f"bits of {self.with_recorded_bits} with recorded ones")
        if self.with_siblings:
            words.append(f"bits of {self.with_siblings} with those of unsharded runs here")
        lines = [", ".join(words)]
        for case, found in self.found.items():
            lines += [f"  {case}", *(f"    {line}" for line in found)]
        return "\n".join(lines)


def check(pool: RankPool, recording: Recording, cases: Sequence[Case], siblings: bool = False) -> Verdict:
    """siblings: compare no bits with recorded ones, as on a machine where torch computes otherwise."""
    verdict = Verdict()
    foreign = [case for case in cases if siblings or not recording.has_bits_of_here(case)]
    wanted = dict(on_ranks(pool, list(dict.fromkeys(case.sibling for case in foreign))))
    for case, result in on_ranks(pool, cases):
        lines = list(differences(recording.results[case]["counts"], result["counts"]))
        if case not in foreign:
            verdict.with_recorded_bits += 1
            lines += differences(recording.results[case]["bits"], result["bits"])
        else:
            verdict.with_siblings += 1
            lines += [f"unsharded {line}" for line in differences(wanted[case.sibling]["bits"], result["bits"])]
        if lines:
            verdict.found[case] = lines
    return verdict


def other_versions(recording: Recording) -> Iterable[str]:
    """What differs between here and where it was recorded."""
    return differences(recording.recorded_with, what_computes())
