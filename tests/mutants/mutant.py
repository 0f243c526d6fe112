"""What a mutant is, and the tests that many of them name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Replace `old` by `new` in `file`; `test` must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


ONE_RANK = "tests/test_parity_one_rank.py::test_a_model_at_its_smallest_budget_has_the_bits_of_the_plain_one"
TWO_RANKS = "tests/dist/test_parity.py::test_two_ranks_at_the_smallest_slots_equal_plain"
PAIRS = "tests/dist/test_parity.py::test_a_sample_of_options_equals_plain[2]"
HALF = "tests/features/test_half.py"
BUILDING = "tests/features/test_zero_init.py::test_weights_and_random_numbers_are_those_of_a_plain_build"
MEMORY = "tests/dist/test_memory.py"
GOLDEN = "tests/golden/test_golden.py::test_a_sample_of_the_recorded_cases_is_as_it_was"
