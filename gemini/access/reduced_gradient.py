"""The result of `parameter.grad` after backward: a tensor of the true shape whose reads return the reduced gradient.

The reduced gradient exists in pieces, one per rank. A function that is given it is called with the whole gradient
instead, which is gathered (a collective with several ranks). If the function writes to the whole, which the schemas of
its operations tell, each rank keeps its own part for the step. A view of the gradient (`grad[:15]`, `grad.T`,
`grad.detach()`) is such a tensor too, with a window of its own on the whole. A view keeps what was gathered for it as
long as that is current, so reading it again, on any rank, is no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemini.access.foreach import for_each_run
from gemini.access.gradient import WholeGradient
from gemini.access.metadata import METADATA
from gemini.access.writes import Writes
from gemini.chunks.chunk import ManagedParameter
from gemini.chunks.placeholder import placeholder, unguarded
from gemini.errors import UnsupportedError
from gemini.manager.snapshots import shares_memory

_T: Any = Tensor
_Held = tuple[Tensor, tuple[object, ...]]  # a whole gradient, (numel,), and the stamp with which it is current


class Window(NamedTuple):
    """The part of a whole gradient that a view shows, in elements of `dtype` if the view has a dtype of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None

    def of(self, whole: Tensor) -> Tensor:
        """A view of `whole`."""
        flat = whole if self.dtype is None else whole.view(self.dtype)
        return torch.as_strided(flat, self.shape, self.stride, self.offset)


def _all_of(managed: ManagedParameter) -> Window:
    return Window(managed.shape, managed.stride, 0, None)


class ReducedGradient(Tensor):
    """A parameter's gradient, or a view of it, gathered when it is read."""

    _source: WholeGradient
    _window: Window
    _held: _Held | None

    def _show(self, source: WholeGradient, window: Window, held: _Held | None) -> None:
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


def _stand_in(source: WholeGradient, window: Window, like: Tensor, held: _Held | None) -> ReducedGradient:
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
    views = iter(shown)  # in the order of the leaves, as `found`
    plain_args, plain_kwargs = pytree.tree_map_only(ReducedGradient, lambda _: next(views), (args, kwargs))
    writes = Writes(whole for _, whole in wholes.values())
    try:
        with writes:
            result = func(*plain_args, **plain_kwargs)
    finally:
        # No operation reports the write of a Python loop.
        if name in _NO_OPERATIONS and args[0] is found[0]:
            writes.note_write(0)
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
    # A NumPy array on the gathered copy: a write to it would be lost, so it is made read-only.
    if hasattr(result, "setflags"):
        result.setflags(write=False)

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
    window = Window(tensor.shape, tensor.stride(), int(tensor.storage_offset()), dtype)
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


# These functions write in a Python loop, which no schema describes.
_NO_OPERATIONS = ("apply_", "map_", "map2_")
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
