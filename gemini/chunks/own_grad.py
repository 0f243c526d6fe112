"""torch's own `.grad`, where autograd accumulates, past the class of wrapped parameters, which shows another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_GRAD: Any = Tensor.grad
grad_of, set_grad_of = _GRAD.__get__, _GRAD.__set__
"""Getter and setter. Call them where `__torch_function__` is disabled."""


def set_grads(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set the `.grad` of each parameter; the loop over them runs in C. Local."""
    with torch._C.DisableTorchFunctionSubclass():
        deque(map(set_grad_of, parameters, grads), 0)
