"""No policy, budget, chunk size or prefetch decides a bit: pairs of them. `benchmarks/same_bits.py` has all of them."""

import itertools
import re
from typing import Any

import pytest

from benchmarks.same_bits import Found, pairs, report
from benchmarks.same_bits_cases import OPTIONS, Bits, Moved, Refused, Trained, matrix, reference, train
from tests.harness.on_ranks import on_ranks_with

STEPS = 3  # the first pass is recorded, the others follow it


SOME: dict[str, dict[str, list[Any]]] = {
    "fp32-and-bf16": {"dtype": ["fp32", "bf16"]},
    "fp16": {"dtype": ["fp16"]},
    "one-policy": {"policy": ["auto"], "dtype": ["bf16"], "micro": [3], "prefetch": [0, 4]},
    "two-policies": {"policy": ["auto", "static, halves"], "dtype": ["bf16"], "micro": [3]},
    "three-policies": {"policy": ["auto", "cpu", "static, halves"]},
}


@on_ranks_with(
    "some",
    {1: ["three-policies"], 2: ["one-policy"]},
    soak={1: ["fp32-and-bf16", "fp16"], 2: ["two-policies", "fp32-and-bf16", "fp16"], 4: ["fp32-and-bf16", "fp16"]},
    timeout_s=240.0,
)
def test_every_pair_of_places_has_the_bits_of_its_reference(rank: int, world_size: int, some: str) -> None:
    wanted: dict[Any, Bits] = {}
    moved = []
    cases = pairs({**OPTIONS, **SOME[some], "ranks": [world_size]})
    for case in cases:
        done = train(rank, case, STEPS)
        if isinstance(done, Refused):
            continue
        arithmetic = case.arithmetic
        if arithmetic not in wanted:
            wanted[arithmetic] = reference(rank, arithmetic, STEPS)
        assert done.bits == wanted[arithmetic], case
        moved.append(done.moved)
    # Of the 18 or 30 pairs of a policy and a budget some 12 are refused at most, and a third of those of "auto".
    assert len(moved) >= min(12, 2 * len(cases) // 3)
    assert any(each.evictions for each in moved) and any(each.host_bytes for each in moved)
    assert any(each.ahead for each in moved) == (world_size > 1)


@pytest.mark.parametrize(("world_size", "together"), [(1, 6), (2, 4), (4, 3)])
def test_any_few_options_values_occur_together_in_the_matrix(world_size: int, together: int) -> None:
    cases = [case for case in matrix() if case.ranks == world_size]
    options = {name: values for name, values in OPTIONS.items() if name != "ranks"}
    if world_size == 1:  # there is nothing to gather ahead
        del options["prefetch"]
    for names in itertools.combinations(options, together):
        have = {tuple(getattr(case, name) for name in names) for case in cases}
        assert have == {*itertools.product(*(options[name] for name in names))}


def test_the_table_counts_each_case_of_the_matrix_once() -> None:
    cases = matrix()
    found, bits = Found(), Bits(("0x1.0p+0",), "state")
    for number, case in enumerate(cases):
        done = Refused(7) if number % 3 == 0 else Trained(bits, Moved(1, 0, 0, 0, 1))
        found.note(case, [done] * case.ranks, [bits] * case.ranks)
    page = "\n".join(report(found, 20, 60.0, "command", "commit"))
    assert sum(map(int, re.findall(r"(\d+) (?:same|refused)[ ,]", page))) == len(cases)
    assert "all have the same bits" in page


def test_a_bit_that_differs_on_one_rank_is_found() -> None:
    case = next(case for case in matrix() if case.ranks == 2)
    wanted = Bits(("0x1.0p+0", "0x1.8p+0"), "state")
    moved = Moved(1, 0, 0, 0, 1)
    for other, words in (
        (Bits(("0x1.0p+0", "0x1.8000000000001p+0"), "state"), "rank 1: loss 1 of 2 is 0x1.8000000000001p+0"),
        (Bits(wanted.losses, "another"), "rank 1: losses are equal, the state after the last step is not"),
    ):
        found = Found()
        found.note(case, [Trained(wanted, moved), Trained(other, moved)], [wanted, wanted])
        assert found.wrong[case].startswith(words)
        assert "1 differ or failed" in "\n".join(report(found, 20, 60.0, "command", "commit"))
