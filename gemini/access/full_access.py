"""Whole parameters for a while, and writes through `.data`."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from gemini.access.grad import ReducedGradient
from gemini.access.link import Link, link_of
from gemini.access.released import get_data, set_data, set_source
from gemini.access.states import FlatAccess, FullPrecisionAccess, GradientAccess, StateAccess
from gemini.errors import GeminiError

# -- `.data` and `set_` of parameters that are plain: a write through them is a write to the payload.
#
# A parameter that fetches itself notices its users by `__torch_function__`. A plain one is torch's own class, for which
# nothing is called: a class of ours in its place would cost every small operator an eighth of its forward. `.data` is
# an attribute of that class, and a write through it raises no version counter. So while a call of a model runs,
# `nn.Parameter` has another `data`, which answers as torch's does for all parameters but those of a wrapped model.


_DATA: Any = torch.Tensor.data
_open: set[Watch] = set()
_lock = Lock()


class Watch:
    """A context in which writes through `.data` of plain parameters are noticed. Leaving it twice does no harm."""

    def __enter__(self) -> None:
        with _lock:
            _open.add(self)
            for name, own in _OWN.items():
                setattr(nn.Parameter, name, own)

    def __exit__(self, *error: object) -> None:
        with _lock:
            _open.discard(self)
            if not _open:
                for name in _OWN:
                    if name in nn.Parameter.__dict__:
                        delattr(nn.Parameter, name)


def _plain_link(parameter: Tensor) -> Link | None:
    return link_of(parameter) if type(parameter) is nn.Parameter else None


def _get(parameter: Tensor) -> Tensor:
    link = _plain_link(parameter)
    if link is None:
        found: Tensor = _DATA.__get__(parameter)
        return found
    chunk = link.managed.chunk
    # Another module's, which may leave while the user still has the answer: that one fetches itself, as outside.
    if chunk.may_leave and not link.step.params.is_pinned(chunk):
        return get_data(parameter)
    return link.data()


def _set(parameter: Tensor, value: Tensor) -> None:
    if _plain_link(parameter) is None:
        _DATA.__set__(parameter, value)
    else:
        set_data(parameter, value)


def _set_source(parameter: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if _plain_link(parameter) is None:
        return torch.Tensor.set_(parameter, *args, **kwargs)
    return set_source(parameter, *args, **kwargs)


_OWN: dict[str, Any] = {"data": property(_get, _set), "set_": _set_source}
"""What `nn.Parameter` has while a call runs."""


# -- Whole or local fp32 weights, gradients and optimizer states of one parameter, to read and to set.
#
# The names are DeepSpeed's. All of it is called between steps, and on every rank but for `safe_get_local_*`. What is
# set whole is rank 0's value. Gradients are there after backward and before the step. A value that was set is what the
# next forward and the next step use. With tensor parallelism what is "full" is whole over all parts, too, and all of
# them call it; "local" is this rank's piece of its part.


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """A copy of `param`'s fp32 master, whole, in its shape, on the compute device. Collective.

    A parameter without a master, which is fp32 or frozen, gives its own value in fp32; fp64 parameters stay fp64.
    Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> safe_get_full_fp32_param(model.module[0].weight).shape
        torch.Size([8, 8])
    """
    link = _begin("safe_get_full_fp32_param", param)
    return _whole(link, link.states.full_precision(link.managed.chunk))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of `param`'s reduced gradient, whole, in its shape, in fp32, without the loss scale. Collective.

    None, on all ranks, if no rank has had a gradient of it since the last step. Raises TypeError if `param` is
    not a `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> weight = model.module[0].weight
        >>> loss = model(torch.ones(2, 8, device=current_device())).sum()
        >>> optimizer.backward(loss)
        >>> safe_get_full_grad(weight).shape
        torch.Size([8, 8])
    """
    link = _begin("safe_get_full_grad", param)
    gradient = link.gradient()
    if not isinstance(gradient, ReducedGradient):
        return None
    whole = _joined(link, gradient.plain())
    return whole if whole.dtype is torch.float64 else whole.float()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of an optimizer state of `param`'s such as "exp_avg", whole, on the compute device. Collective.

    None if `param` is frozen. Raises ValueError if the optimizer keeps no state `optim_state_key`. Raises TypeError for
    a parameter that is not a `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> safe_get_full_optimizer_state(model.module[0].weight, "exp_avg").shape
        torch.Size([8, 8])
    """
    link = _begin("safe_get_full_optimizer_state", param)
    return _whole(link, _state(link, optim_state_key)) if param.requires_grad else None


def kept_optimizer_state(param: nn.Parameter, name: str) -> Tensor:
    """A state of a parameter, also of a frozen one, in the parameter's shape. Collective.

    As the parameter itself it is this rank's part of what tensor parallelism divides.
    """
    link = _begin("optimizer.state", param)
    return _of_data(link, _state(link, name))


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set `param` and its fp32 master to rank 0's `value`. Collective.

    `value` has `param`'s shape, and any dtype and device. Raises ValueError for another shape; nothing has changed
    then. Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> weight = model.module[0].weight
        >>> safe_set_full_fp32_param(weight, torch.ones(8, 8))
        >>> weight.sum().item()
        64.0
    """
    link = _begin("safe_set_full_fp32_param", param)
    _set_whole(link, link.states.full_precision(link.managed.chunk), value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set `param`'s gradient, which the next step clips and uses, to rank 0's `value`. Collective.

    `value` has `param`'s shape and no loss scale. Raises ValueError for another shape, and GeminiError if there was no
    backward since the last step; nothing has changed then. Raises TypeError for a parameter that is not a
    `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> weight = model.module[0].weight
        >>> optimizer.backward(model(torch.ones(2, 8, device=current_device())).sum())
        >>> safe_set_full_grad(weight, torch.ones(8, 8))
        >>> safe_get_full_grad(weight).sum().item()
        64.0
    """
    link = _begin("safe_set_full_grad", param)
    gradients = _trained_gradients(link)
    # The norm of the old gradients must not clip the new ones.
    link.states.before_gradient_write()
    _set_whole(link, gradients, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set an optimizer state of `param`'s such as "exp_avg" to rank 0's `value`, which has its shape. Collective.

    Raises ValueError for another shape, or if the optimizer keeps no state `optim_state_key`; nothing has changed then.
    Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> weight = model.module[0].weight
        >>> safe_set_full_optimizer_state(weight, torch.ones(8, 8), "exp_avg")
        >>> safe_get_full_optimizer_state(weight, "exp_avg").sum().item()
        64.0
    """
    link = _begin("safe_set_full_optimizer_state", param)
    _set_whole(link, _state(link, optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """A copy of the part of `param`'s fp32 master that this rank updates: 1-D, in the order of memory. Local.

    It may have no elements. Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a forward or
    backward.

    Example:
        >>> safe_get_local_fp32_param(model.module[0].weight).shape  # one rank has all of it
        torch.Size([64])
    """
    link = _begin("safe_get_local_fp32_param", param)
    return _local(link, link.states.full_precision(link.managed.chunk))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's part of `safe_get_full_grad(param)`: 1-D, in the order of memory. Local.

    Raises GeminiError if backwards under `no_sync()` are not reduced yet, which needs all ranks. Raises TypeError if
    `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> optimizer.backward(model(torch.ones(2, 8, device=current_device())).sum())
        >>> safe_get_local_grad(model.module[0].weight).shape  # one rank has all of it
        torch.Size([64])
    """
    link = _begin("safe_get_local_grad", param)
    grads = link.step.grads
    # A local function cannot catch up on reductions: these are collectives.
    if grads.books.awaits_reduction:
        raise GeminiError(
            f"the gradient of {link.managed.name!r} is from backwards under no_sync() and not reduced yet, which needs "
            "all ranks: call safe_get_full_grad() or optimizer.clip_grad_norm_() on all of them first"
        )
    if link.gradient() is None:
        return None
    if grads.of(link.managed.chunk).awaits_replicas:
        raise GeminiError(
            f"replicas have not added up the gradient of {link.managed.name!r} yet, which needs all ranks: call "
            "safe_get_full_grad() or optimizer.clip_grad_norm_() on all of them first"
        )
    # `_gradients` is no collective here, because no reduction is awaited.
    own = _local(link, _gradients(link))
    return own if own.dtype is torch.float64 else own.float()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of this rank's part of an optimizer state of `param`'s: 1-D, in the order of memory. Local.

    None if `param` is frozen. Raises ValueError if the optimizer keeps no state `optim_state_key`. Raises TypeError for
    a parameter that is not a `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> safe_get_local_optimizer_state(model.module[0].weight, "exp_avg").shape  # one rank has all of it
        torch.Size([64])
    """
    link = _begin("safe_get_local_optimizer_state", param)
    return _local(link, _state(link, optim_state_key)) if param.requires_grad else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of `param`, and of its fp32 master, to the 1-D `value`. Collective.

    Raises ValueError if `value` has not the shape that `safe_get_local_fp32_param` returns. Raises TypeError if
    `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.

    Example:
        >>> weight = model.module[0].weight
        >>> safe_set_local_fp32_param(weight, 2 * safe_get_local_fp32_param(weight))
    """
    link = _begin("safe_set_local_fp32_param", param)
    _set_local(link, link.states.full_precision(link.managed.chunk), value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of `param`'s gradient, which the next step uses, to the 1-D `value`. Every rank calls it.

    Raises ValueError if `value` has not the shape that `safe_get_local_grad` returns, and GeminiError if there was no
    backward since the last step. Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a
    forward or backward.

    Example:
        >>> weight = model.module[0].weight
        >>> optimizer.backward(model(torch.ones(2, 8, device=current_device())).sum())
        >>> safe_set_local_grad(weight, safe_get_local_grad(weight) / 2)
    """
    link = _begin("safe_set_local_grad", param)
    gradients = _trained_gradients(link)
    link.states.before_gradient_write()
    _set_local(link, gradients, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of an optimizer state of `param`'s to the 1-D `value`. Every rank calls it.

    Raises ValueError if `value` has not the shape that `safe_get_local_optimizer_state` returns, or if the optimizer
    keeps no state `optim_state_key`. Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a
    forward or backward.

    Example:
        >>> weight = model.module[0].weight
        >>> moment = safe_get_local_optimizer_state(weight, "exp_avg")
        >>> safe_set_local_optimizer_state(weight, moment / 2, "exp_avg")
    """
    link = _begin("safe_set_local_optimizer_state", param)
    _set_local(link, _state(link, optim_state_key), value)


def _begin(what: str, param: nn.Parameter) -> Link:
    link = link_of(param) if isinstance(param, Tensor) else None
    if link is None:
        raise TypeError(f"{what}() takes a parameter of a ShardedModel, found {type(param).__name__}")
    link.step.check_idle(f"{what}()")
    # A parameter that was unfrozen since the last forward gets its master and optimizer memory before it is set.
    # Between a backward and its step memory cannot move, and the call would be refused.
    if what.startswith("safe_set") and not link.step.grads.num_backwards:
        link.trainability.apply_unfrozen()
    return link


def _state(link: Link, key: str) -> FlatAccess:
    states, managed = link.states, link.managed
    names = states.names_of(managed)
    if key not in names:
        if states.kept is not None and key in (states.kept.scalars_of(managed) or {}):
            raise ValueError(
                f"optimizer state {key!r} of {managed.name!r} has another shape than the parameter, so every rank has "
                f"it whole: read or set optimizer.state[parameter][{key!r}]"
            )
        reason = "the model has no ShardedOptimizer" if states.kept is None else f"it has {sorted(names) or 'none'}"
        raise ValueError(f"parameter {managed.name!r} has no optimizer state {key!r}: {reason}")
    return states.of_optimizer(managed.chunk, key)


def _gradients(link: Link) -> GradientAccess:
    """Collective if backwards under no_sync() have left their reduction for later."""
    with link.step.publishing():
        link.step.reductions.catch_up()
    gradients = link.states.gradients(link.managed.chunk)
    if gradients is None:
        raise GeminiError(f"parameter {link.managed.name!r} has no gradient: no backward() since the last step")
    return gradients


def _trained_gradients(link: Link) -> GradientAccess:
    """`_gradients` of a parameter that is trained: a step would use those of a frozen one in a trained chunk."""
    if not link.managed.is_trained:
        raise GeminiError(
            f"{link.managed.name!r} is frozen: nothing would use its gradient. Call requires_grad_() on it first"
        )
    return _gradients(link)


def _whole(link: Link, access: StateAccess) -> Tensor:
    return _joined(link, _of_data(link, access))


def _of_data(link: Link, access: StateAccess) -> Tensor:
    """What the ranks of the data have together, of which tensor parallelism may leave a part here."""
    with link.step.publishing(), torch.no_grad():
        return link.managed.shaped(access.whole(link.managed))


def _joined(link: Link, own: Tensor) -> Tensor:
    """The whole of a tensor that is divided as the parameter. Collective over the parts."""
    part = link.managed.part
    with link.step.publishing(), torch.no_grad():
        return own if part is None else part.whole(own)


def _local(link: Link, access: StateAccess) -> Tensor:
    # An exception is not published from here: the other ranks do not wait for a local read.
    with torch.no_grad():
        return access.local(link.managed)


def _set_whole(link: Link, access: FlatAccess | FullPrecisionAccess, value: Tensor) -> None:
    """Set a state to rank 0's `value`. Collective."""
    managed = link.managed
    # In full precision: the master takes the value before it is rounded to the weights' dtype.
    dtype = torch.float64 if managed.dtype is torch.float64 else torch.float32
    # Checked inside `publishing`: a wrong value on one rank must end the broadcast of the others.
    with link.step.publishing(), torch.no_grad():
        _check(value, managed.whole_shape, f"the value for {managed.name!r}")
        value = _own_part(link, value.detach(), dtype)
        # This is always a copy: on ranks other than 0 the broadcast overwrites it, and `value` is the user's.
        flat = torch.empty(managed.numel, dtype=dtype, device=access.device).copy_(managed.laid_out(value))
        link.step.communicator.broadcast_(flat, f"a value for {managed.name}")
        access.set_whole(managed, flat)


def _own_part(link: Link, value: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's part of what the first part's ranks give. Collective over the parts; else `value`."""
    part, parts = link.managed.part, link.step.communicator.parts
    if part is None or parts is None:
        return value
    shared = value.to(link.step.communicator.device, dtype, copy=True)
    parts.collectives.broadcast_(shared, 0)
    return part.of(shared)


def _set_local(link: Link, access: FlatAccess | FullPrecisionAccess, value: Tensor) -> None:
    managed = link.managed
    numel = sum(piece.numel for piece in managed.pieces)
    # Checked inside, because other ranks may be in a collective that this part of a value calls for.
    with link.step.publishing(), torch.no_grad():
        _check(value, torch.Size([numel]), f"this rank's part of {managed.name!r}")
        access.set_local(managed, value)


def _check(value: object, shape: torch.Size, what: str) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{what} must be a tensor of shape {tuple(shape)}, found {found}")
