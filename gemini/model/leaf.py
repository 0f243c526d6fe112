"""Leaves whose parts are used by some ranks only: backward must pass through them on every rank, in the same order.

[Note: Leaves] Backward enters a leaf when the gradient of one of its outputs is ready. Then all of its chunks are
fetched, and they stay until backward needs another chunk. Inside the leaf autograd runs its nodes in any order, without
a collective. On a rank that used nothing of the leaf autograd would bypass it, and the modules that made its inputs.
So -0.0, made from all inputs, is added to every output. It changes no bit, and its backward gives the inputs no
gradient but makes autograd visit the nodes behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gemini.model.tensors import map_tensors, tensors_in


class _MinusZero(torch.autograd.Function):
    """A scalar -0.0 that depends on `inputs`."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.num_inputs = len(inputs)
        # Not 0.0, which would turn an output of -0.0 into 0.0.
        return torch.full((), -0.0, dtype=like.dtype, device=like.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * (1 + ctx.num_inputs)


def reached_by_backward(inputs: Any, output: Any, enter: Callable[[Tensor], None]) -> Any:
    """Make `output` depend on all `inputs`, and call `enter` when backward reaches it. See [Note: Leaves]."""
    linked = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]

    def reached(value: Tensor) -> Tensor:
        # Backward never reaches an integer output, such as the numbers of the chosen experts.
        if not (value.is_floating_point() or value.is_complex()):
            return value
        # The anchor gives the output a graph even if no input requires a gradient.
        anchor = torch.empty((), dtype=value.dtype, device=value.device, requires_grad=True)
        value = value + _MinusZero.apply(anchor, *linked)
        # On every output: which gradient is ready first depends on the rest of the graph. `enter` does nothing in a
        # leaf that backward is in.
        value.register_hook(enter)
        return value

    return map_tensors(reached, output)
