"""What DeepSpeed's scripts find on a parameter: `ds_id`, `ds_shape`, `ds_numel`, `ds_status`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

from gemini.access.parameter_link import any_link_of
from gemini.access.released import ZeroParamStatus

_ids = itertools.count()


def mark(parameters: Iterable[Tensor]) -> None:
    """Give parameters of a wrapped model, or of one that is built, DeepSpeed's attributes. Local, alike on every rank.

    Scripts of its users gather what has a `ds_id`, and take any other parameter for whole: one that is saved so would
    be refused by pickle in the middle of its file.
    """
    for parameter in parameters:
        its = vars(parameter)
        if any_link_of(parameter) is None or "ds_id" in its:
            continue
        # A parameter that is whole is a plain one, which has these. While it is not, its class answers `ds_status`.
        its |= {"ds_id": next(_ids), "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
        its["ds_status"] = ZeroParamStatus.AVAILABLE
