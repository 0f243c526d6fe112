"""Functions of a released parameter that its link answers, or refuses, in torch's place.

Functions that run on the parameter's data, and those that write to it, are in released.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gemini.access.address import MovingAddress
from gemini.access.parameter_link import assign_grad, detached_from, known_link_of, shown_grad
from gemini.access.refusals import refuse_traced
from gemini.errors import ReleasedParameterError

_T: Any = torch.Tensor
_NEW_PARAMETER = (
    "clone() it first, which gives a tensor of its own. weight_norm, or another parametrization that makes new "
    "parameters of this one, is put onto the module before ShardedModel(...)"
)
_ADDRESS = (
    "its memory moves. Read it (clone(), item(), numpy()) instead, or use model.state_dict(). copy.deepcopy(model) of "
    "the ShardedModel is a plain module"
)


def _is_detached(tensor: Tensor) -> bool:
    """Whether the tensor is a lazy detach of a parameter, and not the parameter."""
    return detached_from(tensor) is not tensor


def refusal(what: str, remedy: str) -> Callable[..., Any]:
    """A function that raises ReleasedParameterError for the parameter that it is given."""

    def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = known_link_of(tensor).managed.name
        # In a function that is being compiled another remedy helps, so that error comes first.
        refuse_traced(name)
        raise ReleasedParameterError(f"{what} of parameter {name!r} is not possible: {remedy}")

    return refuse


def _set_requires_grad(tensor: Tensor, value: bool = True) -> Tensor:
    if value and not _is_detached(tensor):
        known_link_of(tensor).raise_flag()
    # Each use takes the parameter's data again, so a detached tensor would get no gradient.
    elif value:
        refusal("requires_grad of what was detached", _NEW_PARAMETER)(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        tensor.requires_grad_(value)
    return tensor


def _address(tensor: Tensor) -> MovingAddress:
    managed = known_link_of(tensor).managed
    return MovingAddress(managed.parameter, managed.name)


def deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Carry out `copy.deepcopy()`. Collective."""
    link = known_link_of(tensor)
    # `copy.deepcopy` knows objects by their id: with the parameter's, a lazy detach of it shares its copy.
    key = id(link.managed.parameter)
    if key not in memo:
        memo[key] = link.copy()
    copied: nn.Parameter = memo[key]
    return copied.detach() if _is_detached(tensor) else copied


def describe(tensor: Tensor, **kwargs: Any) -> str:
    """The text of the parameter, which shows no values: reading them would be a collective."""
    link = known_link_of(tensor)
    kind = "detached Parameter" if _is_detached(tensor) else "Parameter"
    return f"{kind} {link.managed.name!r}: {link.describe}"


def _stride(tensor: Tensor, dim: int | None = None) -> Any:
    stride = known_link_of(tensor).managed.stride
    return stride if dim is None else stride[dim]


def _is_same_size(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def _is_contiguous(tensor: Tensor, **kwargs: Any) -> bool:
    managed = known_link_of(tensor).managed
    return torch.empty_strided(managed.shape, managed.stride, device="meta").is_contiguous(**kwargs)


refuse_pickling = refusal("pickling", "save the state_dict() of the ShardedModel instead")

ANSWERS: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: shown_grad,
    _T.grad.__set__: assign_grad,
    _T.requires_grad.__set__: _set_requires_grad,
    _T.requires_grad_: _set_requires_grad,
    _T.__repr__: describe,
    _T.__str__: describe,
    _T.__format__: lambda tensor, spec="": describe(tensor),
    _T.stride: _stride,
    _T.is_same_size: _is_same_size,
    torch.is_same_size: _is_same_size,
    _T.is_contiguous: _is_contiguous,
    _T.data_ptr: _address,
    _T.untyped_storage: refusal("untyped_storage", _ADDRESS),
    _T.storage: refusal("storage", _ADDRESS),
    _T.storage_offset: refusal("storage_offset", _ADDRESS),
    _T.share_memory_: refusal("share_memory_", _ADDRESS),
    _T.__deepcopy__: deep_copy,
    _T.__reduce_ex__: refuse_pickling,
    # The weights stay in their chunks: CuDNN accepts them unflattened.
    torch._cudnn_rnn_flatten_weight: lambda *args: None,
}
"""What torch would run, and what is run in its place."""
