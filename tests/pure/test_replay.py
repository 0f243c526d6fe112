"""Which collectives go without a comparison of tags: those of the last complete pass of the kind, until one differs."""

from collections.abc import Sequence

from gemini.ranks.communicator import Collective, ScheduleReplay


def collectives(chunks: Sequence[int]) -> list[Collective]:
    return [Collective(0, chunk, 4 * chunk) for chunk in chunks]


def run(replay: ScheduleReplay, kind: str, chunks: Sequence[int]) -> tuple[int | None, list[bool]]:
    """(what begin() says, for which collectives ranks have agreed)"""
    number = replay.begin(kind)
    kept = [replay.matches(collective) for collective in collectives(chunks)]
    replay.end()
    return number, kept


def test_the_first_pass_is_compared_and_the_next_followed() -> None:
    replay = ScheduleReplay()
    assert run(replay, "train", [1, 2, 3]) == (None, [False] * 3)
    number, kept = run(replay, "train", [1, 2, 3])
    assert number is not None
    assert kept == [True] * 3
    assert run(replay, "train", [1, 2, 3]) == (number, [True] * 3)


def test_a_difference_ends_it_for_the_pass_which_is_then_the_expected_one() -> None:
    replay = ScheduleReplay()
    run(replay, "train", [1, 2, 3])
    before, kept = run(replay, "train", [1, 4, 3, 5])
    assert kept == [True, False, False, False], "the third is as expected, but ranks have left the schedule"
    after, kept = run(replay, "train", [1, 4, 3, 5])
    assert after != before
    assert kept == [True] * 4


def test_a_longer_and_a_shorter_pass() -> None:
    replay = ScheduleReplay()
    run(replay, "train", [1, 2])
    assert run(replay, "train", [1, 2, 3])[1] == [True, True, False]
    assert run(replay, "train", [1])[1] == [True]
    assert run(replay, "train", [1, 2])[1] == [True, False]


def test_kinds_do_not_mix_and_the_position_counts() -> None:
    replay = ScheduleReplay()
    run(replay, "train", [1, 2])
    assert run(replay, "step", [1, 2]) == (None, [False, False])
    replay.begin("train")
    assert not replay.matches(Collective(0, 1, 5)), "the same chunk at another position"


def test_outside_a_pass_nothing_is_agreed_and_a_pass_that_was_left_is_not_expected() -> None:
    replay = ScheduleReplay()
    run(replay, "train", [1, 2])
    assert not any(replay.matches(collective) for collective in collectives([1, 2]))
    replay.begin("train")
    assert replay.matches(collectives([1])[0])
    replay.drop()
    assert not replay.matches(collectives([2])[0])
    replay.end()
    assert run(replay, "train", [1, 2])[1] == [True, True]


def test_an_empty_pass_expects_nothing() -> None:
    replay = ScheduleReplay()
    run(replay, "train", [])
    assert run(replay, "train", [1]) == (None, [False])


def test_a_pass_that_is_cut_short_is_left_at_the_next_collective() -> None:
    """Other ranks may still follow the schedule: whoever finds `follows` before another collective meets them first."""
    for end in (ScheduleReplay.end, ScheduleReplay.drop):
        replay = ScheduleReplay()
        run(replay, "train", [1, 2])
        assert not replay.follows
        replay.begin("train")
        replay.matches(collectives([1])[0])
        end(replay)
        assert replay.follows
        replay.drop()
        assert replay.follows, "until there is another collective"
        assert not replay.matches(collectives([3])[0])
        assert not replay.follows
