"""A sample of a matrix has every value, is the same everywhere, and leaves the rest to `make soak`."""

from itertools import product
from pathlib import Path

import pytest

from tests.harness.sampling import sample

pytest_plugins = ["pytester"]
CASES = [
    dict(zip(("stage", "dtype", "ranks"), values, strict=True)) for values in product(range(4), range(3), range(2))
]


@pytest.mark.parametrize(("every", "count"), [(1, 24), (2, 12), (4, 6), (6, 4), (8, 3)])
def test_every_value_is_in_a_sample_that_has_room_for_all_of_its_parameter(every: int, count: int) -> None:
    chosen = sample(CASES, every)
    assert len(chosen) == count
    numbers = {name: len({CASES[place][name] for place in chosen}) for name in CASES[0]}
    assert all(numbers[name] == of for name, of in (("stage", 4), ("dtype", 3), ("ranks", 2)) if of <= count)


def test_a_sample_has_as_many_pairs_as_it_has_room_for() -> None:
    chosen = sample(CASES, 2)
    assert len({(CASES[place]["stage"], CASES[place]["dtype"]) for place in chosen}) == 12


def test_one_case_is_its_own_sample_and_of_none_there_is_none() -> None:
    assert sample([{"stage": 3}], 4) == {0}
    assert sample([], 4) == frozenset()


def test_of_one_parameters_values_a_sample_has_one_in_so_many() -> None:
    assert sample([{"name": name} for name in "abcdefg"], 3) == {0, 3, 6}


SUITE = """
import pytest

@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.soak)])
def test_matrix(stage, dtype): pass

def test_alone(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """With the conftest's hook alone: the rest of it is not about this."""
    root = Path(__file__).resolve().parents[2]
    pytester.syspathinsert(root)
    pytester.makeconftest(
        "import pytest\n"
        "from tests.harness.sampling import mark_what_is_left_out\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark_what_is_left_out(items)\n"
    )
    pytester.makeini("[pytest]\nmarkers = soak\n  sampled\n")
    pytester.makepyfile(test_suite=SUITE)
    return pytester


def test_what_is_in_no_sample_runs_with_the_long_tests_and_by_its_id(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess("-m", "not soak").assert_outcomes(passed=3, deselected=10)
    suite.runpytest_inprocess("-m", "soak").assert_outcomes(passed=10, deselected=3)
    suite.runpytest_inprocess("-m", "not soak", "test_suite.py::test_matrix[bf16-2]").assert_outcomes(passed=1)


def test_the_mark_on_a_test_without_parameters_is_an_error(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_other="import pytest\n@pytest.mark.sampled(2)\ndef test_one(): pass\n")
    found = suite.runpytest_inprocess()
    found.stderr.fnmatch_lines(["*test_one has the mark sampled and no parameters*"])
