"""Released parameters: they look like the parameters they are, and fetch themselves when something reads them.

A parameter is a plain `nn.Parameter` only while an operator of its chunk runs inside a step. Otherwise its class is
`ReleasedParameter`. Its `__torch_function__` answers questions about shape, dtype and device from metadata and fetches
the chunk before any function that needs data. Hence `F.linear(x, other.weight)`, `weight.norm()` in a loss, `nn.init`
and in-place edits just work. With several ranks a fetch is a collective: all ranks must run the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemini.access.answers import ANSWERS, deep_copy, describe, refusal, refuse_pickling
from gemini.access.conversion import CONVERSION, is_unwritten, unwritten
from gemini.access.edges import backward, gradients
from gemini.access.foreach import for_each_run
from gemini.access.in_place import OVERWRITES, name_of, written_by
from gemini.access.metadata import METADATA
from gemini.access.parameter_link import ParameterLink, any_link_of, detached_from, known_link_of
from gemini.access.refusals import cannot_take
from gemini.chunks.placeholder import unguarded
from gemini.errors import ReleasedParameterError, UnsupportedError
from gemini.manager.snapshots import shares_memory

_T: Any = torch.Tensor


class ReleasedParameter(nn.Parameter):
    """A managed parameter outside its operators."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    # torch's wrappers read these before they take a parameter over.

    @property
    def _fsdp_flattened(self) -> NoReturn:
        raise cannot_take("FullyShardedDataParallel", known_link_of(self).managed.name)

    @property
    def _fsdp_orig_uid(self) -> NoReturn:
        raise cannot_take("fully_shard", known_link_of(self).managed.name)

    # torch never calls __torch_function__ for these.

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return describe(self)

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        return set_source(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickling(self)
        raise AssertionError("unreachable")


class LazyDetach(Tensor):
    """`parameter.detach()`: shares the parameter's data without holding its memory; it is fetched when it is read.

    It shows the placeholder even while the parameter is bound, so that functions which take over a tensor's memory,
    such as `plain.weight.data = wrapped.weight.data`, are refused.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    if name_of(func).startswith("_foreach_"):
        return for_each_run(partial(_use, func), name_of(func), args, kwargs, _chunk_of)
    return _use(func, args, kwargs)


def _use(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetch the parameters that `func` is given, call it, and note what it wrote to."""
    found = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, (ReleasedParameter, LazyDetach))]
    links = [known_link_of(tensor) for tensor in found]
    by_owner: dict[object, list[ParameterLink]] = {}  # a wrapped model's, or a build's
    for link in links:
        by_owner.setdefault(link.owner, []).append(link)
    with ExitStack() as stack:
        first = args[0] if args else kwargs.get("tensor")  # nn.init gives it by keyword
        # `a.copy_(b)` reads `b`, so nothing may be skipped where a second parameter is an argument.
        overwrites = len(found) == 1 and first is found[0] and name_of(func) in OVERWRITES
        detached = all(isinstance(tensor, LazyDetach) for tensor in found)
        for its_links in by_owner.values():
            stack.enter_context(its_links[0].fetched(its_links, overwrites, detached))
        # This comes before lazy tensors are replaced, because what is written to is compared with `found` by identity.
        written = written_by(func, args, kwargs)
        if any(isinstance(t, LazyDetach) for t in found):
            given = partial(_materialise, written)
            args, kwargs = pytree.tree_map_only(LazyDetach, given, (args, kwargs))
        for tensor, link in zip(found, links, strict=True):
            if any(tensor is each for each in written):
                link.before_write()
        versions = [link.version() for link in links]  # in-place functions that no name tells raise these
        # torch does not call back into `_dispatch`, because inside `fetched` parameters have the class `nn.Parameter`.
        result = func(*args, **kwargs)
        views = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor, link, version in zip(found, links, versions, strict=True):
            was_written = any(tensor is each for each in written) or link.version() != version
            is_seen = link.before_write_through(views) if not was_written else False
            # A write through a view of .data raises no version counter: assume one.
            if was_written or (is_seen and tensor.__dict__.get("_may_be_written")):
                link.mark_edited()
        return result


def _materialise(written: Sequence[Tensor], lazy: LazyDetach) -> Tensor:
    """The memory behind a detached parameter. written: the arguments that the function writes to."""
    link = known_link_of(lazy)
    if lazy.__dict__.get("_may_be_written"):
        # A function that only reads it, such as a norm, keeps no copy of the old weights.
        return link.data(writes=any(lazy is each for each in written))
    parameter: Tensor = link.managed.parameter  # plain inside `fetched`
    return parameter.detach()


# -- functions with an answer of their own


def _link_or_none(value: Any) -> ParameterLink | None:
    return any_link_of(value) if isinstance(value, (ReleasedParameter, LazyDetach)) else None


def _chunk_of(value: Any) -> object:
    link = _link_or_none(value)
    return None if link is None else (link.owner, link.managed.chunk.index)


def get_data(tensor: Tensor) -> Tensor:
    lazy = _detach(tensor)
    lazy._may_be_written = True  # type: ignore[attr-defined]
    return lazy


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Carry out `.data = value`. May be collective.

    Raises ReleasedParameterError for what the parameter's memory cannot take, and UnsupportedError for no values.
    """
    link = known_link_of(tensor)
    managed = link.managed
    if not isinstance(value, Tensor):
        raise ReleasedParameterError(f"parameter {managed.name!r}: its .data cannot be of type {type(value).__name__}")
    # `p.data = p.data` changes nothing.
    if any_link_of(value) is link:
        return
    link.refuse_sharing(value)
    if is_unwritten(value) and not link.may_be_emptied:  # as by `to_empty()`
        raise UnsupportedError(f"parameter {managed.name!r} would lose its values: {CONVERSION}")
    if not link.fits(value):
        link.replace_data(value)
        return
    # Outside of no_grad() autograd refuses in-place operations on trained leaves; `.data =` is allowed.
    payload = link.managed.chunk.payload
    if any_link_of(value) is None and payload is not None and shares_memory(value, payload):
        value = value.clone()  # such as a transpose of the parameter itself
    with torch.no_grad():
        # What is detached is fetched, and pinned, also where the parameter is plain.
        _use(_T.copy_, (_detach(tensor), value), {})


def set_source(tensor: Tensor, source: Any = None, *rest: Any, **kwargs: Any) -> Tensor:
    """Carry out `set_`, by which a parametrization assigns the values that its inverse has found."""
    if not isinstance(source, Tensor) or rest or kwargs:
        refusal("set_ to a storage", "write to it in place, or assign a tensor to its .data")(tensor)
    set_data(tensor, source)
    return tensor


def _copy(tensor: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """Carry out `copy_`, as `Module.load_state_dict()` does: the fp32 master takes values before they are rounded."""
    link = known_link_of(tensor) if isinstance(tensor, (ReleasedParameter, LazyDetach)) else None
    if link is None or not isinstance(source, Tensor) or isinstance(source, (ReleasedParameter, LazyDetach)):
        return cast(Tensor, _use(_T.copy_, (tensor, source), {"non_blocking": non_blocking}))
    result: Tensor = _use(_T.copy_, (tensor, source), {"non_blocking": non_blocking})
    link.keep_wide(source)
    return result


def _detach(tensor: Tensor) -> Tensor:
    link = known_link_of(tensor)
    with torch._C.DisableTorchFunctionSubclass(), unguarded():
        lazy = Tensor._make_subclass(LazyDetach, link.managed.placeholder)
    lazy._detached_from = detached_from(tensor)  # type: ignore[attr-defined]
    if tensor.__dict__.get("_may_be_written"):
        lazy._may_be_written = True  # type: ignore[attr-defined]
    return lazy


def _convert(func: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion that changes nothing returns the tensor itself without a fetch. Others read it."""

    def convert(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(_probe, args)), {name: _probe(value) for name, value in kwargs.items()}
        if _link_or_none(tensor) is None:  # another tensor is converted to be like ours
            return func(tensor, *args, **kwargs)
        probe = _probe(tensor)
        is_of_layout = kwargs.get("memory_format") not in (None, torch.preserve_format)
        if not is_of_layout and func(probe, *args, **kwargs) is probe:
            return tensor
        return _use(func, (tensor, *args), kwargs)

    return convert


def _empty_like(*args: Any, **kwargs: Any) -> Tensor:
    """Called by `module.to_empty()`, which then assigns the result to `.data`."""
    return unwritten(_use(torch.empty_like, args, kwargs))


def _probe(value: Any) -> Any:
    """An element of the same dtype and device for what fetches itself; any other value as it is."""
    return value if _link_or_none(value) is None else torch.empty((), dtype=value.dtype, device=value.device)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    **ANSWERS,
    torch.autograd.grad: gradients,
    torch.autograd.backward: backward,
    _T.data.__get__: get_data,
    _T.data.__set__: set_data,
    _T.copy_: _copy,
    _T.detach: _detach,
    torch.detach: _detach,
    torch.empty_like: _empty_like,
}


for _name_of_conversion in ("to", "float", "double", "half", "bfloat16", "cpu", "cuda", "type"):
    _SPECIAL[getattr(_T, _name_of_conversion)] = _convert(getattr(_T, _name_of_conversion))
