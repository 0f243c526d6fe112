"""Gradient transforms of torch.func, and which models they are refused for.

[Note: Transforms] `grad`, `vjp`, `jacrev` and `hessian` refuse saved-tensor hooks, so their graph keeps views of the
weights themselves. That is right for weights that stay where they are until a step, and refused for others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gemini.access.parameter_link import any_link_of
from gemini.chunks.chunk import Chunk
from gemini.chunks.param_state import ParamState
from gemini.errors import UnsupportedError
from gemini.memory.modes import unwrapped

hooks_are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""False inside torch.func's gradient transforms."""


def check_operator(module: nn.Module, chunks: Iterable[Chunk]) -> None:
    """Raises UnsupportedError if a graph that `module` builds now could lose its weights, which are in `chunks`.

    `functional_call` may have put other tensors in the parameters' place; these are the user's own.
    """
    if torch.is_grad_enabled() and not hooks_are_allowed():
        links = (any_link_of(unwrapped(parameter)) for parameter in module.parameters())
        used = {link.managed.chunk for link in links if link is not None}
        check_chunks(chunk for chunk in chunks if chunk in used)


def check_chunks(chunks: Iterable[Chunk]) -> None:
    """Raises UnsupportedError if a graph that is built now could lose the weights of `chunks`."""
    if torch.is_grad_enabled() and not hooks_are_allowed():
        for chunk in chunks:
            if chunk.state is not ParamState.RESIDENT and chunk.own_slot is None:
                raise UnsupportedError(
                    f"torch.func.grad (vjp, jacrev, hessian) through {chunk.names()} is not possible while it can "
                    "leave the device, as these transforms allow no saved-tensor hooks. Keep everything resident with "
                    "tensor_placement_policy='cuda' or a larger device_memory=, or use torch.autograd.grad"
                )
