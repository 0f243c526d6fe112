"""`torch.autograd.grad` and `backward(inputs=)` with respect to parameters that fetch themselves.

Both need the parameters' places in the graph only: being an input fetches nothing, and backward fetches what it reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemini.access.parameter_link import any_link_of


def gradients(
    outputs: Any, inputs: Any, *, materialize_grads: bool = False, allow_unused: bool | None = None, **options: Any
) -> tuple[Tensor | None, ...]:
    """The result of `torch.autograd.grad`."""
    edges = tuple(map(_edge, outputs)), tuple(map(_edge, inputs))
    # As in torch, `materialize_grads=True` allows unused inputs; `found` has None for them.
    found = torch.autograd.grad(*edges, allow_unused=materialize_grads or allow_unused, **options)
    # torch would make the zeros from the inputs; here these are edges, which have no shape.
    if not materialize_grads:
        return found
    return tuple(
        torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if grad is None else grad
        for tensor, grad in zip(inputs, found, strict=True)
    )


def backward(tensors: Any, *, inputs: Any = None, **options: Any) -> None:
    """Do what `torch.autograd.backward` does. As an input a parameter is not fetched.

    Held from the first node of backward to the last, it would need a slot that backward may not have.
    """
    # A parameter that backward starts from is followed by a tensor of its own, which is no input of ours any more.
    roots = [
        tensor if not isinstance(tensor, Tensor) or any_link_of(tensor) is None else tensor.clone()
        for tensor in tensors
    ]
    torch.autograd.backward(roots, inputs=None if inputs is None else tuple(map(_edge, inputs)), **options)


def _edge(tensor: Any) -> Any:
    """The gradient edge of a parameter that fetches itself; any other tensor as it is."""
    if not isinstance(tensor, Tensor) or any_link_of(tensor) is None:
        return tensor
    if not tensor.requires_grad:
        raise RuntimeError("One of the differentiated Tensors does not require grad")  # torch's own message
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(tensor)
