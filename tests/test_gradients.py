"""What a user does with `.grad`, on one rank."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import gradients


@pytest.mark.parametrize("wrap", gradients.WRAPS, ids=str)
def test_a_parameter_without_a_gradient_has_none(wrap: dict[str, Any]) -> None:
    gradients.idle(0, 1, wrap)


def test_one_may_ask_what_a_gradient_is_without_reading_it() -> None:
    gradients.asked_on_one_rank(0, 1)


EVERYWHERE = pytest.mark.parametrize("wrap", [*gradients.WRAPS[2:], {"chunk_size": 2048}], ids=str)


@EVERYWHERE
def test_writes_reach_the_step(wrap: dict[str, Any]) -> None:
    gradients.writes(0, 1, wrap)


@EVERYWHERE
def test_writes_between_micro_batches_and_gradients_that_no_backward_made(wrap: dict[str, Any]) -> None:
    gradients.micro_batches(0, 1, wrap)


@EVERYWHERE
@pytest.mark.parametrize("case", [gradients.clips, gradients.after_our_clip, gradients.reads], ids=lambda c: c.__name__)
def test_clipping_and_reading(case: Callable[[int, int, dict[str, Any]], None], wrap: dict[str, Any]) -> None:
    case(0, 1, wrap)


def test_what_cannot_be_written_is_refused_and_changes_nothing() -> None:
    gradients.refused(0, 1)


@pytest.mark.parametrize("wrap", gradients.FP16, ids=str)
def test_fp16_gradients_are_seen_and_set_without_the_loss_scale(wrap: dict[str, Any]) -> None:
    gradients.unscaled(0, 1, wrap)
