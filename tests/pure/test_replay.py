"""Which collectives go without a comparison of tags: those of the last complete pass of the kind, until one differs."""

from collections.abc import Sequence

from gemini.ranks.replay import Agreement, Collective


def collectives(chunks: Sequence[int]) -> list[Collective]:
    return [Collective(0, chunk, 4 * chunk) for chunk in chunks]


def run(agreement: Agreement, kind: str, chunks: Sequence[int]) -> tuple[int | None, list[bool]]:
    """(what begin() says, for which collectives ranks have agreed)"""
    number = agreement.begin(kind)
    kept = [agreement.keeps(collective) for collective in collectives(chunks)]
    agreement.end()
    return number, kept


def test_the_first_pass_is_compared_and_the_next_followed() -> None:
    agreement = Agreement()
    assert run(agreement, "train", [1, 2, 3]) == (None, [False] * 3)
    number, kept = run(agreement, "train", [1, 2, 3])
    assert number is not None
    assert kept == [True] * 3
    assert run(agreement, "train", [1, 2, 3]) == (number, [True] * 3)


def test_a_difference_ends_it_for_the_pass_which_is_then_the_expected_one() -> None:
    agreement = Agreement()
    run(agreement, "train", [1, 2, 3])
    before, kept = run(agreement, "train", [1, 4, 3, 5])
    assert kept == [True, False, False, False], "the third is as expected, but ranks have left the agreement"
    after, kept = run(agreement, "train", [1, 4, 3, 5])
    assert after != before
    assert kept == [True] * 4


def test_a_longer_and_a_shorter_pass() -> None:
    agreement = Agreement()
    run(agreement, "train", [1, 2])
    assert run(agreement, "train", [1, 2, 3])[1] == [True, True, False]
    assert run(agreement, "train", [1])[1] == [True]
    assert run(agreement, "train", [1, 2])[1] == [True, False]


def test_kinds_do_not_mix_and_the_moment_counts() -> None:
    agreement = Agreement()
    run(agreement, "train", [1, 2])
    assert run(agreement, "step", [1, 2]) == (None, [False, False])
    agreement.begin("train")
    assert not agreement.keeps(Collective(0, 1, 5)), "the same chunk at another moment"


def test_outside_a_pass_nothing_is_agreed_and_a_pass_that_was_left_is_not_expected() -> None:
    agreement = Agreement()
    run(agreement, "train", [1, 2])
    assert not any(agreement.keeps(collective) for collective in collectives([1, 2]))
    agreement.begin("train")
    assert agreement.keeps(collectives([1])[0])
    agreement.leave()
    assert not agreement.keeps(collectives([2])[0])
    agreement.end()
    assert run(agreement, "train", [1, 2])[1] == [True, True]


def test_an_empty_pass_expects_nothing() -> None:
    agreement = Agreement()
    run(agreement, "train", [])
    assert run(agreement, "train", [1]) == (None, [False])
