"""What a mutant is, and the tests that many of them name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Replace `old` by `new` in `where`; `test` must then fail. `tests/mutants/places.py` finds the place.

    Attributes:
        where: `Class.method`, a class, a function, or the name of a constant, in whichever file it is.
        old: an expression, statements, or the line that begins a block, such as `if x:`, for that line alone; an `elif`
            is written as `if`. Only the syntax counts: line breaks, parentheses and comments may differ.
        new: of the same kind; nothing for statements that are taken out.
        package: begin of the module's name, where `old` stands in two places of that name.
        index: which of several places, from 0.
    """

    name: str
    where: str
    old: str
    new: str
    test: str
    package: str = ""
    index: int | None = None


ONE_RANK = "tests/test_parity_one_rank.py::test_a_model_at_its_smallest_budget_has_the_bits_of_the_plain_one"
TWO_RANKS = "tests/dist/test_parity.py::test_two_ranks_at_the_smallest_slots_equal_plain"
PAIRS = "tests/dist/test_parity.py::test_a_sample_of_options_equals_plain[2]"
HALF = "tests/features/test_half.py"
BUILDING = "tests/features/test_zero_init.py::test_weights_and_random_numbers_are_those_of_a_plain_build"
MEMORY = "tests/dist/test_memory.py"
GOLDEN = "tests/golden/test_golden.py::test_a_sample_of_the_recorded_cases_is_as_it_was"
