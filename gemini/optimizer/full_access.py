"""Whole or local fp32 weights, gradients and optimizer states of one parameter, to read and to set.

The names are DeepSpeed's. All of it is called between steps, and on every rank but for `safe_get_local_*`. What is set
whole is rank 0's value. Gradients are there after backward and before the step. A value that was set is what the next
forward and the next step use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemini.errors import GeminiError
from gemini.executor.masters import whole_master
from gemini.executor.spreading import spread
from gemini.memory.transfer import ready
from gemini.model.gradient import factors_of, scaled
from gemini.model.link import Link, link_of
from gemini.model.reduced_gradient import ReducedGradient
from gemini.model.weights import gather_optimizer_state
from gemini.optimizer.chunk_state import ChunkOptimizerState
from gemini.optimizer.shard_view import ShardView, Staging
from gemini.placement.demand import Kind, Tier
from optim import HALF_DTYPES, round_master_


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """A copy of `param`'s fp32 master, whole, in its shape, on the compute device. Collective.

    A parameter without a master, which is fp32 or frozen, gives its own value in fp32; fp64 parameters stay fp64.
    Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_get_full_fp32_param", param)
    managed, executor = link.managed, link.executor
    with executor.publishing(), torch.no_grad():
        executor.binding.write_back_all([managed.chunk])
        master = whole_master(managed.chunk)
        if master is not None:
            return _shaped(gather_optimizer_state(executor, managed.chunk, master), link)
        whole = executor.fetch(managed.chunk)
        return _shaped(whole if whole.dtype is torch.float64 else whole.float(), link)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of `param`'s reduced gradient, whole, in its shape, in fp32, without the loss scale. Collective.

    None, on all ranks, if no rank has had a gradient of it since the last step. Raises TypeError if `param` is
    not a `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_get_full_grad", param)
    gradient = link.gradient()
    if not isinstance(gradient, ReducedGradient):
        return None
    whole = gradient.plain()
    return whole if whole.dtype is torch.float64 else whole.float()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of an optimizer state of `param`'s such as "exp_avg", whole, on the compute device. Collective.

    None if `param` is frozen. Raises ValueError if the optimizer keeps no state `optim_state_key`. Raises TypeError for
    a parameter that is not a `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_get_full_optimizer_state", param)
    if not param.requires_grad:
        return None
    flat = _state(link, optim_state_key)
    with link.executor.publishing(), torch.no_grad():
        return _shaped(gather_optimizer_state(link.executor, link.managed.chunk, flat), link)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set `param` and its fp32 master to rank 0's `value`. Collective.

    `value` has `param`'s shape, and any dtype and device. Raises ValueError for another shape; nothing has changed
    then. Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_set_full_fp32_param", param)
    _set_weights(link, link.managed.parts_of(_rank_0s(link, value)))


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set `param`'s gradient, which the next step clips and uses, to rank 0's `value`. Collective.

    `value` has `param`'s shape and no loss scale. Raises ValueError for another shape, and GeminiError if there was no
    backward since the last step; nothing has changed then. Raises TypeError for a parameter that is not a
    `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_set_full_grad", param)
    flat = _gradient(link)
    _set_gradient(link, flat, link.managed.parts_of(_rank_0s(link, value)))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set an optimizer state of `param`'s such as "exp_avg" to rank 0's `value`, which has its shape. Collective.

    Raises ValueError for another shape, or if the optimizer keeps no state `optim_state_key`; nothing has changed then.
    Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_set_full_optimizer_state", param)
    flat = _state(link, optim_state_key)
    _write(link, flat, link.managed.parts_of(_rank_0s(link, value)))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """A copy of the part of `param`'s fp32 master that this rank updates: 1-D, in the order of memory. Local.

    It may have no elements. Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a forward or
    backward.
    """
    link = _begin("safe_get_local_fp32_param", param)
    with torch.no_grad():
        return _local(link, _view(link).load().clone())


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's part of `safe_get_full_grad(param)`: 1-D, in the order of memory. Local.

    Raises GeminiError if backwards under `no_sync()` are not reduced yet, which needs all ranks. Raises TypeError if
    `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_get_local_grad", param)
    if link.executor.gradients.accumulation.awaits_reduction:
        raise GeminiError(
            f"the gradient of {link.managed.name!r} is from backwards under no_sync() and not reduced yet, which needs "
            "all ranks: call safe_get_full_grad() or optimizer.clip_grad_norm_() on all of them first"
        )
    if link.gradient() is None:
        return None
    flat = _gradient(link)
    inv_scale, clip = factors_of(link)
    return _local(link, flat if flat.dtype is torch.float64 else flat.float()) * inv_scale * clip


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of this rank's part of an optimizer state of `param`'s: 1-D, in the order of memory. Local.

    None if `param` is frozen. Raises ValueError if the optimizer keeps no state `optim_state_key`. Raises TypeError for
    a parameter that is not a `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_get_local_optimizer_state", param)
    if not param.requires_grad:
        return None
    return _local(link, _state(link, optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of `param`, and of its fp32 master, to the 1-D `value`. Collective.

    Raises ValueError if `value` has not the shape that `safe_get_local_fp32_param` returns. Raises TypeError if
    `param` is not a `ShardedModel`'s, and GeminiError inside a forward or backward.
    """
    link = _begin("safe_set_local_fp32_param", param)
    _set_weights(link, _checked_local(link, value))


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of `param`'s gradient, which the next step uses, to the 1-D `value`. Every rank calls it.

    Raises ValueError if `value` has not the shape that `safe_get_local_grad` returns, and GeminiError if there was no
    backward since the last step. Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a
    forward or backward.
    """
    link = _begin("safe_set_local_grad", param)
    _set_gradient(link, _gradient(link), _checked_local(link, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of an optimizer state of `param`'s to the 1-D `value`. Every rank calls it.

    Raises ValueError if `value` has not the shape that `safe_get_local_optimizer_state` returns, or if the optimizer
    keeps no state `optim_state_key`. Raises TypeError if `param` is not a `ShardedModel`'s, and GeminiError inside a
    forward or backward.
    """
    link = _begin("safe_set_local_optimizer_state", param)
    _write(link, _state(link, optim_state_key), _checked_local(link, value))


def _begin(what: str, param: nn.Parameter) -> Link:
    link = link_of(param) if isinstance(param, Tensor) else None
    if link is None:
        raise TypeError(f"{what}() takes a parameter of a ShardedModel, found {type(param).__name__}")
    link.executor.check_idle(f"{what}()")
    if what.startswith("safe_set_full") and not link.executor.gradients.num_backwards:
        link.freezing.settle_unfrozen()
    return link


def _shaped(whole: Tensor, link: Link) -> Tensor:
    return link.managed.view(whole).to(link.executor.fetcher.device.device, copy=True)


def _state(link: Link, key: str) -> Tensor:
    optimizer: Any = link.optimizer
    states: dict[int, ChunkOptimizerState] = {} if optimizer is None else optimizer._states
    state = states.get(link.managed.chunk.index)
    managed = link.managed
    names = () if state is None else state.names(managed.position)
    if state is None or key not in names:
        reason = "the model has no ShardedOptimizer" if optimizer is None else f"it has {sorted(names) or 'none'}"
        raise ValueError(f"parameter {link.managed.name!r} has no optimizer state {key!r}: {reason}")
    return state.flats[key]


def _gradient(link: Link) -> Tensor:
    """Collective if backwards under no_sync() have left its reduction for later."""
    with link.executor.publishing():
        link.executor.gradients.catch_up()
    gradient = link.executor.gradients.find(link.managed.chunk)
    if gradient is None or not gradient.is_reduced:
        raise GeminiError(f"parameter {link.managed.name!r} has no gradient: no backward() since the last step")
    return ready(gradient.reduced())


def _rank_0s(link: Link, value: Tensor) -> Tensor:
    """The parameter's elements in their order in memory, 1-D, equal on all ranks. Collective."""
    managed, communicator = link.managed, link.executor.communicator
    dtype = torch.float64 if managed.chunk.dtype is torch.float64 else torch.float32
    device = link.executor.fetcher.device.device
    with link.executor.publishing(), torch.no_grad():
        if not isinstance(value, Tensor) or value.shape != managed.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            wanted = tuple(managed.shape)
            raise ValueError(f"the value for {managed.name!r} must be a tensor of shape {wanted}, found {found}")
        flat = managed.laid_out(value, dtype, device).clone()
        if communicator.world_size > 1:
            communicator.broadcast_(flat, f"a value for {managed.name}")
    return flat


def _checked_local(link: Link, value: Tensor) -> list[Tensor]:
    managed = link.managed
    sizes = [piece.numel for piece in managed.pieces]
    if not isinstance(value, Tensor) or value.shape != (sum(sizes),):
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"this rank's part of {managed.name!r} must be a tensor of shape ({sum(sizes)},), found {found}"
        )
    return list(value.split(sizes))


def _local(link: Link, flat: Tensor) -> Tensor:
    return torch.cat([flat[:0], *link.managed.own_parts(flat)])


def _write(link: Link, flat: Tensor, parts: Sequence[Tensor]) -> None:
    """flat's elements of the parameter <- parts."""
    with torch.no_grad():
        for target, part in zip(link.managed.own_parts(flat), parts, strict=True):
            target.copy_(part)


def _set_gradient(link: Link, flat: Tensor, parts: Sequence[Tensor]) -> None:
    """The parameter has a gradient now, and a norm that was computed before does not count any more."""
    inv_scale, _ = factors_of(link)
    _write(link, flat, [scaled(part, inv_scale) for part in parts])
    chunk = link.managed.chunk
    gradient, position = link.executor.gradients.of(chunk), link.managed.position
    gradient.got[position] = gradient.agreed[position] = 1
    gradient.num_writes += 1
    optimizer: Any = link.optimizer
    if optimizer is not None:
        optimizer.forget_summary()


def _view(link: Link) -> ShardView:
    chunk, executor = link.managed.chunk, link.executor
    executor.binding.write_back(chunk)
    tiers = {chunk.homes[kind].tier for kind in (Kind.PARAM, Kind.MASTER) if kind in chunk.homes}
    return ShardView(chunk, executor.fetcher, Staging(), Tier.DEVICE if tiers == {Tier.DEVICE} else Tier.HOST)


def _rounded(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights without a master, which are frozen, round as masters do."""
    if part.dtype is not torch.float32 or dtype not in HALF_DTYPES:
        return part
    rounded = torch.empty_like(part, dtype=dtype)
    round_master_(rounded, part)
    return rounded


def _set_weights(link: Link, parts: Sequence[Tensor]) -> None:
    """As an update of these elements would, on every rank."""
    chunk, executor = link.managed.chunk, link.executor
    with executor.publishing(), torch.no_grad():
        executor.before_chunk_update(chunk)
        if chunk.lent:
            executor.restore_parameters(chunk)
        view = _view(link)
        weights = view.load()
        if link.managed.owns_master:
            link.managed.has_fractions = True
        else:
            parts = [_rounded(part, chunk.dtype) for part in parts]
        _write(link, weights, parts)
        view.close(complete=True)
        executor.after_chunk_update(chunk)
        if chunk.home_layout.world_size < chunk.optim_layout.world_size:
            spread(executor, chunk)
