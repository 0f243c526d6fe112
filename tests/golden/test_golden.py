"""Nothing moved: bits, bytes, collectives and peaks of many cases are what they were when they were recorded."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.golden.cases import CORE, OPTIONS, Case, is_allowed, sample_of
from tests.golden.checking import check, other_versions
from tests.golden.recording import Recording, differences, what_computes
from tests.golden.running import merged
from tests.harness.on_ranks import in_soak
from tests.harness.ranks import RankPool

RECORDING = Recording.read()
SAMPLE = sample_of(list(RECORDING.results))
HOW_TO_GO_ON = (
    "If this change is meant to move these numbers, say in its commit which and why, and record them again: "
    "python -m tests.golden record (tests/golden/README.md)"
)

Note = Callable[[str, object], None]


def assert_as_recorded(ranks: RankPool, note: Note, cases: Sequence[Case], siblings: bool = False) -> None:
    verdict = check(ranks, RECORDING, cases, siblings)
    note("shown", str(verdict).splitlines()[0])
    if verdict.found:
        elsewhere = [f"recorded with other versions: {line}" for line in other_versions(RECORDING)]
        pytest.fail("\n".join([str(verdict), *elsewhere, HOW_TO_GO_ON]), pytrace=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [1, 2, *in_soak(3)])
def test_a_sample_of_the_recorded_cases_is_as_it_was(ranks: RankPool, record_property: Note, world_size: int) -> None:
    assert_as_recorded(ranks, record_property, [case for case in SAMPLE if case.ranks == world_size][::5])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_all_recorded_cases_are_as_they_were(ranks: RankPool, record_property: Note) -> None:
    assert_as_recorded(ranks, record_property, list(RECORDING.results))


@pytest.mark.filterwarnings("ignore")
def test_where_torch_computes_otherwise_bits_are_those_of_unsharded_runs(
    ranks: RankPool, record_property: Note
) -> None:
    """What a machine with other kernels compares."""
    some = [next(case for case in SAMPLE if case.ranks == ranks_ and case.freezes) for ranks_ in OPTIONS["ranks"]]
    assert_as_recorded(ranks, record_property, some, siblings=True)


def test_bits_of_other_kernels_are_not_compared_even_where_torch_alone_agrees() -> None:
    """Two steps of torch alone may agree by chance, and a longer training of the same model differ."""
    case = next(iter(RECORDING.results))
    recording = Recording("", what_computes())
    recording.note_torch_bits(case)
    assert recording.has_bits_of_here(case)
    recording.recorded_with["torch_kernels"] = "another width"
    assert not recording.has_bits_of_here(case)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_all_bits_are_those_of_unsharded_runs(ranks: RankPool, record_property: Note) -> None:
    assert_as_recorded(ranks, record_property, list(RECORDING.results), siblings=True)


def test_the_recorded_cases_have_every_pair_of_options() -> None:
    """A model that is new in the zoo, or an option that is new here, is recorded before it counts as covered."""
    values = [(name, value) for name in OPTIONS for value in OPTIONS[name]]
    wanted = {pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0] and _can_be(dict(pair))}
    recorded = {pair for case in RECORDING.results for pair in combinations(case.options.items(), 2)}
    assert not wanted - recorded, HOW_TO_GO_ON
    all_of_core = product(*(OPTIONS[name] for name in CORE))
    assert {tuple(case.options[name] for name in CORE) for case in RECORDING.results} == set(all_of_core)
    assert {value for case in SAMPLE for value in case.options.items()} == set(values), "of the sample"


def _can_be(pair: dict[str, Any]) -> bool:
    """In a case that is simple in all other respects."""
    simple = {name: values[0] for name, values in OPTIONS.items()} | {"model": "chain"}
    return any(is_allowed(simple | also | pair) for also in ({}, {"dtype": "bf16"}, {"optimizer": "sgd"}))


def test_a_difference_names_the_quantity_and_says_what_it_was_and_is() -> None:
    was = {"counts": {"fetches": [4, 0], "links": {"host->device": 8}}, "bits": {"weights": "aa"}}
    now = {"counts": {"fetches": [5, 0], "links": {}, "spills": 1}, "bits": {"weights": "aa"}}
    assert list(differences(was, now)) == [
        "counts.fetches: was [4,0], is [5,0]",
        "counts.links.host->device: was 8, is null",
        "counts.spills: was null, is 1",
    ]


def test_what_ranks_say_becomes_one_result() -> None:
    """A rank whose weights differ, or that moved a byte more, shows."""
    one = {"bits": {"losses": ["a1", "b1"], "weights": "cc"}, "counts": {"sent": 8, "links": {"host->device": 4}}}
    other = {"bits": {"losses": ["a2", "b1"], "weights": "cc"}, "counts": {"sent": 8, "links": {}}}
    both = merged([one, other])
    assert both["counts"] == {"sent": 8, "links": {"host->device": [4, None]}}
    assert both["bits"]["weights"] == "cc"
    assert both["bits"]["losses"][1] == "b1"
    assert both["bits"]["losses"][0] not in ("a1", "a2")
    assert merged([one, one]) == one
