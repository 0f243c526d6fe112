"""Leaves of which each rank uses other parts: backward must pass through them on every rank, in one order.

[Note: Leaves] Backward enters a leaf when the gradient of one of its outputs is there; then all of its chunks are
fetched, and stay until backward asks for something else. Inside, nodes run in an order of their own, without a
collective. A rank that used nothing of the leaf would go around it, and around what made its inputs. So every output
gets a summand that is made of all inputs: -0.0, which changes no bit, and whose backward gives the inputs no gradient
but lets autograd visit what made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _MinusZero(torch.autograd.Function):
    """A scalar -0.0 that depends on `inputs`."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.num_inputs = len(inputs)
        return torch.full((), -0.0, dtype=like.dtype, device=like.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * (1 + ctx.num_inputs)


def reached_by_backward(inputs: Any, output: Any, enter: Callable[[], None]) -> Any:
    """`output` made dependent on all `inputs`; `enter` is called when backward comes to it.

    Both are containers that torch knows, to any depth.
    """
    linked = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]

    def hook(grad: Tensor) -> None:
        enter()

    def reached(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        anchor = torch.empty((), dtype=value.dtype, device=value.device, requires_grad=True)
        value = value + _MinusZero.apply(anchor, *linked)
        value.register_hook(hook)
        return value

    return pytree.tree_map(reached, output)
