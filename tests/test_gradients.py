"""What a user does with `.grad`, on one rank."""

from typing import Any

import pytest

from tests import gradients


@pytest.mark.parametrize("wrap", gradients.WRAPS, ids=str)
def test_a_parameter_without_a_gradient_has_none(wrap: dict[str, Any]) -> None:
    gradients.idle(0, 1, wrap)
