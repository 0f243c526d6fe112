"""`.grad`: a read joins what ranks have reduced, a write reaches the place where it rests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemini.access.functions import METADATA, Writes, for_each_run
from gemini.access.states import States
from gemini.errors import GeminiError, UnsupportedError
from gemini.placement.gradient import GradState
from gemini.replan.trainability import Trainability
from gemini.runtime.binding import shares_memory
from gemini.runtime.chunk import ManagedParameter, placeholder, unguarded
from gemini.runtime.step import Step

# -- One parameter's gradient: reduced and whole, or, inside the user's hooks, the one that autograd has just made.
#
# The reduced gradient is gathered to be read; each rank keeps its own part of what is written to it. It rests in
# pieces, one per rank, times the loss scale. Users see and set the gradient itself, as `torch.nn.utils.clip_grad_norm_`
# and a norm in a log need it: without the loss scale, and clipped where `optimizer.clip_grad_norm_()` was called.
# Gradients times a loss scale are shown in fp32, where the unscaled values do not underflow; a write multiplies by the
# loss scale again.
#
# Inside a user's post-accumulate hook the gradient is this rank's own, as in plain PyTorch. The model's own hook takes
# whatever a hook leaves of it.


class HasGradient(Protocol):
    """What a gradient is reached by: the `Link` of its parameter."""

    @property
    def managed(self) -> ManagedParameter: ...

    @property
    def states(self) -> States: ...

    @property
    def step(self) -> Step: ...

    @property
    def trainability(self) -> Trainability: ...


class WholeGradient:
    """The gradient that a parameter has now. It is stale after the step and after `zero_grad()`."""

    def __init__(self, link: HasGradient) -> None:
        self.link = link
        self.managed: ManagedParameter = link.managed
        self._grads = link.step.grads
        # Users may keep this object beyond a step or zero_grad(): the count then shows that it is stale.
        self._num_forgotten = self._grads.num_forgotten

    def stamp(self) -> tuple[object, ...]:
        """A value that is equal as long as `gather()` would return the same values; equal on all ranks."""
        grads, gradient = self._grads, self._grads.find(self.managed.chunk)  # None: frozen meanwhile
        num_writes = 0 if gradient is None else gradient.num_writes
        # In this order: a step or zero_grad(), another micro-batch, a write of the user's, another loss scale or clip.
        return grads.num_forgotten, grads.num_backwards, num_writes, self.link.states.factors_of(self.managed)

    def is_current(self) -> bool:
        """The gradient was neither used by a step nor discarded."""
        return self._num_forgotten == self._grads.num_forgotten and has_gradient(self.link)

    def count_write(self) -> None:
        """Make copies that were gathered before stale."""
        gradient = self._grads.find(self.managed.chunk)
        if gradient is not None:
            gradient.count_write()

    def gather(self) -> Tensor:
        """(numel,) A copy on the compute device, in the order of the payload. Collective where it is sharded.

        Raises GeminiError where it is not reduced yet, or was used by a step or discarded.
        """
        managed, link = self.managed, self.link
        # Views may keep the copy beyond a torch.inference_mode(), outside of which a copy made in it is read-only.
        with link.step.publishing(), torch.inference_mode(False), torch.no_grad():
            self._check()
            if not self._grads.in_backward:
                link.step.reductions.join_replicas()
            reduced, gradient = link.states.gradients(managed.chunk), self._grads.of(managed.chunk)
            # Inside a backward the chunk's gradient may still be open, on its way to the other ranks, or that of this
            # group.
            if reduced is None or gradient.state is not GradState.CLOSED or gradient.awaits_replicas:
                raise _not_reduced(managed)
            return reduced.whole(managed)

    def dtype(self) -> torch.dtype:
        """That of what `gather()` returns: 16-bit gradients of several micro-batches add up in fp32. Local."""
        reduced = self.link.states.gradients(self.managed.chunk)
        return self.managed.dtype if reduced is None else reduced.dtype_of(self.managed)

    def write(self, whole: Tensor) -> None:
        """Set the gradient to `whole`, laid out as by `gather()`; each rank keeps its part. Collective at stage 0."""
        step = self.link.step
        step.check_idle(f"a write to the gradient of {self.managed.name!r}", after_updates=True)
        with step.publishing(), torch.inference_mode(False), torch.no_grad():
            self._check()
            _write(self.link, whole)

    def _check(self) -> None:
        if not self.is_current():
            raise GeminiError(
                f"the gradient of {self.managed.name!r} was used by a step or discarded since this .grad was taken: "
                "keep a clone() of it"
            )
        # It is shown all the same: a loop that passes over gradients of None would silently do nothing.
        self._grads.refuse_updated(
            f"a use of the gradient of {self.managed.name!r}, which a hook sees in the backward (register_hook),",
            self.managed.chunk,
        )


def has_gradient(link: HasGradient) -> bool:
    """Whether any rank has had a gradient since the last step; equal on all ranks.

    Local; collective if backwards under no_sync() have left their reduction for later. Raises GeminiError inside
    a backward whose gradients await their reduction.
    """
    managed, gradients = link.managed, link.step.grads
    # The backward, or what has discarded gradients, may have ended with an exception, which the script has caught.
    if gradients.in_backward or gradients.is_ending:
        link.step.failures.find()
    if not gradients.in_backward:
        with link.step.publishing():
            link.step.reductions.catch_up_flags()
    elif gradients.books.awaits_reduction:
        raise _not_reduced(managed)
    else:
        # Inside a backward: gradients that wait in `.grad` set their flags first.
        link.step.reductions.collect_all()
    gradient = gradients.find(managed.chunk)
    return gradient is not None and bool(gradient.agreed[managed.position])


def assign(link: HasGradient, value: Tensor) -> None:
    """Carry out `parameter.grad = value`. Collective if no rank had a gradient of it. Raises before any change."""
    managed, step = link.managed, link.step
    step.check_idle(f"setting the gradient of {managed.name!r}", after_updates=True)
    with step.publishing(), torch.inference_mode(False), torch.no_grad():
        # Checked inside `publishing`, because other ranks may wait for this one in the agreement below.
        if not isinstance(value, Tensor):
            raise TypeError(f"the gradient of {managed.name!r} must be a tensor or None, found {type(value).__name__}")
        value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        if value.shape != managed.shape or value.is_complex() != managed.dtype.is_complex:
            raise UnsupportedError(
                f"the gradient of {managed.name!r} must be {tuple(managed.shape)} {managed.dtype}, found "
                f"{tuple(value.shape)} {value.dtype}"
            )
        step.reductions.refuse_gift(managed.name)
        # No backward ran since the step: the gradient needs memory, which a plan for inference does not have.
        if not step.grads.num_backwards:
            # A model that has only inferred gets its plan for training first. Flags that were raised come next.
            link.trainability.before_graph()
            link.trainability.apply_unfrozen()
        gradient = step.grads.find(managed.chunk)
        # A frozen parameter may share a chunk, and with it the memory for gradients, with a trained one.
        if gradient is None or not managed.is_trained:
            raise UnsupportedError(
                f"{managed.name!r} is frozen: nothing would use its gradient. Call requires_grad_() on it first"
            )
        if not has_gradient(link):
            # All ranks must set it: one that did not would skip the parameter in the step.
            step.communicator.agree(managed.name.encode(), "the parameter that is given a gradient", remedy=_ALIKE)
            step.grads.start_at_zero(gradient, managed)
        _write(link, managed.laid_out(value))


_ALIKE = "All ranks must set the gradients of the same parameters"


def _write(link: HasGradient, flat: Tensor) -> None:
    """Set the shard to its part of `flat`, (numel,), in payload order."""
    # A clip that was asked for counts for the old gradients: here it takes effect, before one of them changes.
    link.step.reductions.join_replicas()
    link.states.before_gradient_write()
    reduced = link.states.gradients(link.managed.chunk)
    assert reduced is not None
    reduced.set_of_each_rank(link.managed, flat)


def _not_reduced(managed: ManagedParameter) -> GeminiError:
    return GeminiError(f"the gradient of {managed.name!r} is not reduced yet: read it after backward()")


def of_one_rank(link: HasGradient, what: str) -> UnsupportedError:
    """The error for a hook that does something which ranks cannot do apart from one another."""
    ranks = link.step.communicator.world_size
    return UnsupportedError(
        f"a post-accumulate hook {what} of {link.managed.name!r}, and there are {ranks} ranks: "
        "inside a hook each rank has its own gradient, before the mean over ranks, so ranks would be trained "
        "apart. Update with a ShardedOptimizer; a hook may read and change .grad"
    )


# -- The result of `parameter.grad` after backward: a tensor of the true shape whose reads return the reduced gradient.
#
# The reduced gradient exists in pieces, one per rank. A function that is given it is called with the whole gradient
# instead, which is gathered (a collective with several ranks). If the function writes to the whole, which the schemas
# of its operations tell, each rank keeps its own part for the step. A view of the gradient (`grad[:15]`, `grad.T`,
# `grad.detach()`) is such a tensor too, with a window of its own on the whole. A view keeps what was gathered for it as
# long as that is current, so reading it again, on any rank, is no collective.


_T: Any = Tensor
_Held = tuple[Tensor, tuple[object, ...]]  # a whole gradient, (numel,), and the stamp with which it is current


class GradientWindow(NamedTuple):
    """The part of a whole gradient that a view shows, in elements of `dtype` if the view has a dtype of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None

    def of(self, whole: Tensor) -> Tensor:
        """A view of `whole`."""
        flat = whole if self.dtype is None else whole.view(self.dtype)
        return torch.as_strided(flat, self.shape, self.stride, self.offset)


def _all_of(managed: ManagedParameter) -> GradientWindow:
    return GradientWindow(managed.shape, managed.stride, 0, None)


class ReducedGradient(Tensor):
    """A parameter's gradient, or a view of it, gathered when it is read."""

    _source: WholeGradient
    _window: GradientWindow
    _held: _Held | None

    def _show(self, source: WholeGradient, window: GradientWindow, held: _Held | None) -> None:
        """Show this window of a gradient. Once, in place of `__init__`: torch has made the tensor."""
        self._source, self._window, self._held = source, window, held

    @staticmethod
    def of(source: WholeGradient) -> ReducedGradient:
        managed = source.managed
        return _stand_in(source, _all_of(managed), managed.placeholder, None)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # These come first: the getter of `.data` would otherwise pass for that of an attribute below.
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        name = getattr(func, "__name__", "")
        # Attributes are those of the stand-in, except for the few whose getters return the data.
        if func in METADATA or (name in ("__get__", "__set__") and func not in _READS_DATA):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name.startswith("_amp"):
            raise UnsupportedError(
                f"{name} on a gradient of a ShardedModel: train without torch.amp.GradScaler. dtype=torch.bfloat16 "
                "needs no loss scale, and for torch.float16 optimizer.backward(loss) has one"
            )
        # One whole gradient at a time: all of the model's at once may not fit.
        if name.startswith("_foreach_"):
            return for_each_run(partial(_call, func, name), name, args, kwargs, _link_or_none)
        return _call(func, name, args, kwargs)

    def is_all_of(self, managed: ManagedParameter) -> bool:
        """Whether it is this parameter's current gradient, which `parameter.grad *= 2` assigns once more."""
        source = self._source
        return source.managed is managed and source.is_current() and self._window == _all_of(managed)

    def plain(self) -> Tensor:
        """The values as an ordinary tensor, maybe a view of what this tensor holds. Collective like `gather()`."""
        whole, _ = _current(self)
        return self._window.of(whole)


def _stand_in(source: WholeGradient, window: GradientWindow, like: Tensor, held: _Held | None) -> ReducedGradient:
    """A tensor without memory of its own that has the shape, dtype and device of `like`."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        shown = source.managed.placeholder
        # The parameter's placeholder serves for the whole gradient. A view has a shape of its own.
        if like is not shown:
            shown = placeholder(like.dtype, shown.device, window.shape)
        with unguarded():
            gradient: ReducedGradient = Tensor._make_subclass(ReducedGradient, shown)
    gradient._show(source, window, held)
    return gradient


def _current(gradient: ReducedGradient) -> _Held:
    """The whole gradient and its stamp: held by the tensor if current, else gathered."""
    stamp = gradient._source.stamp()
    if gradient._held is not None and gradient._held[1] == stamp:
        return gradient._held
    return gradient._source.gather(), stamp


def _call(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with whole gradients, and bring what it wrote to them to the shards."""
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ReducedGradient)]
    wholes: dict[Any, tuple[WholeGradient, Tensor]] = {}  # by link, in the order of the arguments
    for gradient in found:
        # Views of one gradient share one whole: what is written through one of them shows in the others.
        link = gradient._source.link
        if link not in wholes:
            # If one of the views holds a whole gradient, it may save a gather for all of them.
            held = next((g for g in found if g._source.link is link and g._held is not None), gradient)
            wholes[link] = gradient._source, _current(held)[0]
    shown = [gradient._window.of(wholes[gradient._source.link][1]) for gradient in found]
    writes = Writes(whole for _, whole in wholes.values())
    try:
        result = writes.call(func, args, kwargs, ReducedGradient, shown)
    finally:
        written = {link: pair for i, (link, pair) in enumerate(wholes.items()) if i in writes.written}
        for source, _ in written.values():
            # What views hold is stale, even if an exception follows.
            source.count_write()
    # `grad.t_()` or `grad.unsqueeze_(0)` changes the temporary view only, and the user's tensor would not follow.
    for gradient, tensor in zip(found, shown, strict=True):
        if not _still_shows(gradient, tensor, wholes[gradient._source.link][1]):
            raise UnsupportedError(
                f"{name} would change the shape or the memory of the gradient of {gradient._source.managed.name!r}: "
                "assign the new one to .grad"
            )
    # Gradients are written after all checks, so an error leaves them as they were.
    for source, whole in written.values():
        source.write(whole)

    def returned(tensor: Tensor) -> Any:
        for gradient, its in zip(found, shown, strict=True):
            if tensor is its and gradient._source.link in written:
                # In-place functions return their argument: the gradient itself, which holds no memory.
                return gradient
        # A view of the whole stands for the gradient again; other results are ordinary tensors.
        for source, whole in wholes.values():
            if shares_memory(tensor, whole):
                # Of a write each rank's own part counts, so this copy may differ from the gradient: gather again.
                held = None if source.link in written else (whole, source.stamp())
                return _view(source, tensor, whole, held)
        return tensor

    with torch._C.DisableTorchFunctionSubclass():  # parameters may be among the results
        return pytree.tree_map_only(Tensor, returned, result) if found else result


def _still_shows(gradient: ReducedGradient, tensor: Tensor, whole: Tensor) -> bool:
    window = gradient._window
    same = tensor.shape == window.shape and tensor.stride() == window.stride
    # Empty tensors have no address by which shared memory shows.
    return same and (whole.numel() == 0 or shares_memory(tensor, whole))


def _view(source: WholeGradient, tensor: Tensor, whole: Tensor, held: _Held | None) -> Tensor:
    """The stand-in for `tensor`, a view of the whole gradient."""
    # Conjugation and negation are lazy: a window does not describe them.
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg().clone()
    dtype = None if tensor.dtype is whole.dtype else tensor.dtype
    window = GradientWindow(tensor.shape, tensor.stride(), int(tensor.storage_offset()), dtype)
    return _stand_in(source, window, tensor, held)


def _link_or_none(value: Any) -> object:
    return value._source.link if isinstance(value, ReducedGradient) else None


# -- functions with an answer of their own


def _detach(gradient: ReducedGradient) -> ReducedGradient:
    return _stand_in(gradient._source, gradient._window, gradient, gradient._held)


def _dtype(gradient: ReducedGradient) -> torch.dtype:
    return gradient._window.dtype or gradient._source.dtype()


def _itemsize(gradient: ReducedGradient) -> int:
    return _dtype(gradient).itemsize


def _set_data(gradient: ReducedGradient, value: Tensor) -> None:
    if value.shape != gradient.shape:
        raise UnsupportedError(
            f"the gradient of {gradient._source.managed.name!r} is {tuple(gradient.shape)}; its .data cannot be "
            f"{tuple(value.shape)}"
        )
    with torch.no_grad():
        gradient.copy_(value)


def _requires_grad(gradient: ReducedGradient, value: bool = True) -> ReducedGradient:
    if value:
        raise UnsupportedError(
            f"the gradient of {gradient._source.managed.name!r} carries no graph: use a clone() of it"
        )
    return gradient


def _stride(gradient: ReducedGradient, dim: int | None = None) -> Any:
    return gradient._window.stride if dim is None else gradient._window.stride[dim]


def _is_contiguous(gradient: ReducedGradient, **kwargs: Any) -> bool:
    window = gradient._window
    return torch.empty_strided(window.shape, window.stride, device="meta").is_contiguous(**kwargs)


def _iterate(gradient: ReducedGradient) -> Iterator[Tensor]:
    # torch's own method returns an iterator, inside which `_call` would not find the views of the gradient.
    return iter(torch.unbind(gradient))


def _refuse(what: str, gradient: ReducedGradient, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"{what} of the gradient of {gradient._source.managed.name!r} is not possible: it is in no memory as a "
        "whole. Take it of a clone()"
    )


_READS_DATA: set[Any] = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _T.data.__get__: _detach,
    _T.detach: _detach,
    torch.detach: _detach,
    _T.detach_: lambda gradient: gradient,
    torch.detach_: lambda gradient: gradient,
    _T.data.__set__: _set_data,
    _T.requires_grad.__set__: _requires_grad,
    _T.requires_grad_: _requires_grad,
    _T.dtype.__get__: _dtype,
    _T.itemsize.__get__: _itemsize,
    _T.element_size: _itemsize,
    _T.nbytes.__get__: lambda gradient: gradient.numel() * _itemsize(gradient),
    _T.stride: _stride,
    _T.is_contiguous: _is_contiguous,
    _T.__iter__: _iterate,
}
_SPECIAL |= {
    getattr(_T, name): partial(_refuse, name)
    for name in ("data_ptr", "untyped_storage", "storage", "share_memory_", "__dlpack__", "set_", "resize_")
}
