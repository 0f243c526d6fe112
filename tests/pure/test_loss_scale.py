"""The dynamic loss scale: when it moves, and when it does not."""

import pytest

from gemini.errors import GeminiError
from gemini.optimizer.step import MAX_SKIPPED, LossScale


def test_the_table_of_thirty_steps() -> None:
    """hysteresis 2, growth after 4 good steps, between 4 and 64. x: skipped. Chances come back with growth only."""
    steps = "..x..x....x.x........xx.xxxxxx"
    table = [
        *(16, 16, 16, 16, 16, 8),  # the first skip is forgiven, the second is not, good steps between or not
        *(8, 8, 8, 16, 16, 16, 8, 8, 8, 8, 16),  # growth at the fourth good step gives both chances back
        *(16, 16, 16, 32, 32, 16, 16, 8, 4, 4, 4, 4, 4),  # and then down to the bound
    ]
    scale = LossScale(initial_scale=16, min_scale=4, max_scale=64, growth_interval=4, hysteresis=2)
    found = []
    for step in steps:
        scale.update(step == "x")
        found.append(scale.scale)
    assert found == table


def test_it_never_grows_beyond_its_bound() -> None:
    scale = LossScale(initial_scale=2, max_scale=6, growth_factor=2, growth_interval=1)
    for wanted in (4, 6, 6):
        scale.update(False)
        assert scale.scale == wanted


def test_it_grows_after_a_state_of_a_longer_interval_was_loaded() -> None:
    scale = LossScale(initial_scale=2, growth_interval=10)
    scale.load_state_dict({**scale.state_dict(), "num_good": 1500})
    scale.update(False)
    assert scale.scale == 4
    for _ in range(10):
        scale.update(False)
    assert scale.scale == 8


def test_a_loaded_scale_keeps_to_the_bounds_of_the_one_that_loads_it() -> None:
    static = LossScale(initial_scale=128, min_scale=128, max_scale=128)
    static.load_state_dict(LossScale().state_dict())
    assert static.scale == 128
    with pytest.raises(ValueError, match="more than 0"):
        static.load_state_dict({**static.state_dict(), "scale": 0.0})


def test_twenty_skips_in_a_row_are_an_error_and_nineteen_are_not() -> None:
    scale = LossScale()
    for _ in range(MAX_SKIPPED - 1):
        scale.update(True)
        scale.refuse_endless_skips("w", 1.0)
    scale.update(False)
    for _ in range(MAX_SKIPPED):
        scale.refuse_endless_skips("w", 1.0)
        scale.update(True)
    with pytest.raises(
        GeminiError, match="20 steps in a row were skipped: the gradient of 'w' is not finite at the least"
    ):
        scale.refuse_endless_skips("w", 1.0)


@pytest.mark.parametrize("initial_scale", [1.0, 2.0**10, 2.0**32])
def test_skips_are_no_error_before_a_step_at_the_least_scale_is_one_of_them(initial_scale: float) -> None:
    scale, tried = LossScale(initial_scale, hysteresis=1), list[float]()
    while len(tried) < MAX_SKIPPED or tried[-1] > 1.0:
        if tried:
            scale.refuse_endless_skips("w", tried[-1])
        tried.append(scale.scale)
        scale.update(True)
    with pytest.raises(GeminiError, match="in a row were skipped"):
        scale.refuse_endless_skips("w", tried[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_scale": 0}, "initial_scale must be a finite number above 0"),
        ({"initial_scale": float("inf")}, "initial_scale must be a finite number"),
        ({"initial_scale": 2.0, "min_scale": 4.0}, "must lie between min_scale=4.0 and max_scale"),
        ({"max_scale": True}, "max_scale must be a finite number"),
        ({"growth_factor": 0.5}, "growth_factor must be at least 1"),
        ({"backoff_factor": 1.0}, "backoff_factor below 1"),
        ({"growth_interval": 0}, "growth_interval must be an integer of at least 1"),
        ({"hysteresis": 1.5}, "hysteresis must be an integer"),
    ],
)
def test_bad_bounds_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScale(**arguments)  # type: ignore[arg-type]


def test_it_is_saved_whole() -> None:
    one, other = LossScale(), LossScale()
    for skipped in (True, False, True):
        one.update(skipped)
    other.load_state_dict(one.state_dict())
    assert other == one
    for bad in ({}, {"scale": 1.0}, one.state_dict() | {"scale": float("nan")}, 3):
        with pytest.raises(ValueError, match="loss scale"):
            other.load_state_dict(bad)  # type: ignore[arg-type]
        assert other == one
