"""Operations on released parameters for which torch calls no `__torch_function__`; see [Note: Guarded placeholders].

C++ functions that take a tensor as a number or as data reach the dispatcher with the parameter itself. It is fetched
for them as for any other function. If torch would pass its memory on instead, the operation is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemini.access.parameter_link import any_link_of
from gemini.access.reduced_gradient import ReducedGradient
from gemini.access.released import LazyDetach, ReleasedParameter
from gemini.chunks.placeholder import GUARD
from gemini.errors import ReleasedParameterError

_COMPARES_TYPES = torch.ops.aten._has_compatible_shallow_copy_type.default  # what `.data =` calls first


def _answer(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `operation`, one of whose tensors shows a placeholder."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    released = [tensor for tensor in tensors if isinstance(tensor, (ReleasedParameter, LazyDetach, ReducedGradient))]
    if operation is _COMPARES_TYPES:
        raise ReleasedParameterError(
            f"the memory of {_names(released)} cannot become the .data of another tensor: it moves. Copy the values: "
            "plain.weight.data = wrapped.weight.clone(). To tie two parameters, assign the parameter itself "
            "(a.weight = b.weight) before the model is wrapped"
        )
    # A write would go to the placeholder, which parameters share.
    if not released or operation._schema.is_mutable:
        raise ReleasedParameterError(
            f"{operation} reached the memory of {_names(released)}, which is not here, by a way that cannot fetch it. "
            "Use the parameter itself, through torch's functions, or model.state_dict()"
        )
    # This goes the way of all functions: the parameter is fetched, and the operation is called with plain tensors.
    return type(released[0]).__torch_function__(operation, (), args, kwargs)


def _names(released: Sequence[Tensor]) -> str:
    links = [any_link_of(tensor) for tensor in released]
    names = [f"{link.managed.name!r}" for link in links if link is not None]
    return f"parameter {', '.join(names)}" if names else "a parameter of a ShardedModel"


@functools.cache
def guard_placeholders() -> torch.library.Library:
    """Register `_answer` with torch, once in this process, for the first model: it takes 10 ms."""
    # torch takes a fallback for the namespace `_` only, which stands for all of them.
    library = torch.library.Library("_", "IMPL")
    library.fallback(_answer, GUARD)
    return library  # the registration ends with this object
