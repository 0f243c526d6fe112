"""Which chunk leaves is the best choice: a search over all choices fetches no fewer bytes, in models of few chunks."""

import pytest

from benchmarks.least_traffic import least_bytes, sweep_bytes
from benchmarks.optimal_traffic import MAX_CHUNKS, UNIT, Chain, Row, table
from gemini.placement.next_use import PassSchedule
from gemini.placement.predict import predict
from gemini.placement.simulate import MoveReason


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """By kind of case, as the benchmark prints them."""
    return table()


def test_chunks_of_one_size_move_no_byte_more_than_they_must(rows: dict[str, Row]) -> None:
    """Trained or frozen, with one micro-batch or two, and in forwards without gradients."""
    equal = {kind: row for kind, row in rows.items() if kind.startswith("equal")}
    assert len(equal) == 5
    assert all(row.count and row.worst == 1 for row in equal.values()), equal


def test_chunks_of_several_sizes_move_little_more_than_they_must(rows: dict[str, Row]) -> None:
    """Of two choices that fetch equally often the rule may take the one with more bytes: docs/planning.md."""
    mixed = {kind: row for kind, row in rows.items() if not kind.startswith("equal")}
    assert len(mixed) == 5
    assert all(row.total / row.count < 1.07 and row.worst <= 1.25 for row in mixed.values()), mixed


@pytest.mark.parametrize("num_chunks", range(2, MAX_CHUNKS + 1))
def test_a_forward_and_a_backward_move_what_the_closed_form_says(num_chunks: int) -> None:
    for num_slots in range(2, num_chunks + 1):
        plan = Chain((1,) * num_chunks, num_slots).plan
        wanted = sweep_bytes(4 * UNIT, num_chunks, num_slots)
        assert predict(plan).copies["host->device", MoveReason.PAYLOAD] == wanted
        assert least_bytes(plan, PassSchedule.expected(plan.spec)) == wanted
