"""What an operation on a released parameter does: shows metadata, fetches, or refuses."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemini.access.functions import METADATA, OVERWRITES, for_each_run, name_of, written_by
from gemini.access.grad import ReducedGradient
from gemini.access.parameter_link import (
    ParameterLink,
    any_link_of,
    assign_grad,
    backward,
    by_owner,
    detached_from,
    gradients,
    known_link_of,
    shown_grad,
)
from gemini.errors import ReleasedParameterError, UnsupportedError
from gemini.runtime.binding import shares_memory
from gemini.runtime.chunk import GUARD, unguarded

# -- The result of `data_ptr()` on a released parameter, whose memory moves.


class MovingAddress:
    """Equal to the addresses of the same parameter, under any of its names, and to no other.

    Libraries compare `data_ptr()`s to find tied weights. It is no number: memory that moves may hold something else by
    the time that a number is used as an address.
    """

    __slots__ = ("_name", "_parameter")

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self._parameter = parameter
        self._name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MovingAddress) and other._parameter is self._parameter

    def __hash__(self) -> int:
        return hash(self._parameter)

    def __repr__(self) -> str:
        return f"<address of parameter {self._name!r} of a ShardedModel, which moves>"

    def _no_number(self, *args: Any) -> NoReturn:
        raise ReleasedParameterError(
            f"data_ptr of parameter {self._name!r} is no number: its memory moves. It can be compared with other "
            "data_ptrs. Read the parameter (clone(), item(), numpy()) instead, or use model.state_dict(). "
            "copy.deepcopy(model) of the ShardedModel is a plain module"
        )

    # Every use as a number raises: a kernel that is given the address would read other memory.
    __index__ = __int__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _no_number
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __and__ = _no_number


# -- Error messages for operations that sharded parameters do not support.


def cannot_take(wrapper: str, name: str) -> UnsupportedError:
    """The error for `wrapper`, which would take over a parameter that is sharded already."""
    return UnsupportedError(
        f"{wrapper} cannot take over parameter {name!r}, which a ShardedModel shards and whose gradient it reduces "
        "between ranks itself: use the ShardedModel as it is, with its own no_sync(), and wrap only modules beside it"
    )


def refuse_traced(parameter: str) -> None:
    """Raises ReleasedParameterError if the compiler is tracing a function that uses the parameter of this name."""
    if torch._guards.CompileContext.try_get() is not None:
        raise _class_of_refusals()(
            f"a compiled function uses parameter {parameter!r}, which is not fetched for it: compile the module that "
            "owns the parameter instead of a function that uses it, call that module through the ShardedModel, and "
            "before wrapping declare what it borrows with gemini.register_external_parameter(module, parameter)"
        )


@functools.cache
def _class_of_refusals() -> type[ReleasedParameterError]:
    """A `ReleasedParameterError` that reaches the user: the compiler wraps errors of any class but a few of its own.

    For most of those it would break the graph and go on to compile our functions, but not for `ShortenTraceback`.
    """
    from torch._dynamo.exc import ShortenTraceback  # slow to import, but a compiler that traces has done so

    class RefusedWhileTraced(ReleasedParameterError, ShortenTraceback):
        def __init__(self, message: str) -> None:
            ShortenTraceback.__init__(self, message, first_useful_frame=None)

    return RefusedWhileTraced


# -- Conversions of a module: those that change nothing (`.float()` of an fp32 module) are allowed, others are refused.


CONVERSION = (
    ".to(), .cuda(), .half(), .to_empty() and the like cannot change a ShardedModel: give device= and dtype= to "
    "ShardedModel(...). copy.deepcopy(model) is a plain module in host memory, which can be converted"
)


def unwritten(tensor: Tensor) -> Tensor:
    """Mark `tensor` as allocated but not written to since, and return it."""
    # Inference tensors have no version counter.
    if not tensor.is_inference():
        tensor._gemini_unwritten = tensor._version  # type: ignore[attr-defined]
    return tensor


def is_unwritten(tensor: Tensor) -> bool:
    """Whether a marked tensor still has no values. A tensor on the meta device never has any."""
    known: int | None = getattr(tensor, "_gemini_unwritten", None)
    return tensor.is_meta or (known is not None and known == tensor._version)


def changes_nothing(convert: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> bool:
    """Whether `convert` would return every tensor itself. It is tried on small tensors of the same kinds."""
    for dtype, device, dim in sorted({(t.dtype, t.device, t.dim()) for t in tensors}, key=str):
        # Two elements in each dimension: with one, a tensor would be contiguous in every memory format.
        probe = torch.empty((2,) * dim, dtype=dtype, device=device)
        try:
            if convert(probe) is not probe and not _only_copies(convert, probe):
                return False
        # The conversion is to a device that this machine does not have.
        except (RuntimeError, AssertionError):
            return False
    return True


def _only_copies(convert: Callable[[Tensor], Tensor], probe: Tensor) -> bool:
    """Whether `convert` copies within one device: `.to("cpu:0")` copies a tensor on "cpu", which is the same device."""
    # Two values: memory that the conversion allocates without copying does not follow both.
    for value in (0, 1):
        result = convert(probe.fill_(value))
        same = result.dtype is probe.dtype and result.device == probe.device and result.stride() == probe.stride()
        if not same or not torch.equal(result, probe):
            return False
    return probe.device.type == "cpu"


# -- Functions of a released parameter that its link answers, or refuses, in torch's place.


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


class ZeroParamStatus(Enum):
    """DeepSpeed's words for where a parameter's values are, for scripts of its users."""

    AVAILABLE = 1
    """They are whole on this rank."""
    NOT_AVAILABLE = 2
    """They are in their chunk, and fetched when something reads them."""
    INFLIGHT = 3
    """Never said: what reads a parameter waits for it."""


# -- Released parameters: they look like the parameters they are, and fetch themselves when something reads them.
#
# A parameter is a plain `nn.Parameter` only while an operator of its chunk runs inside a step. Otherwise its class is
# `ReleasedParameter`. Its `__torch_function__` answers questions about shape, dtype and device from metadata and
# fetches the chunk before any function that needs data. Hence `F.linear(x, other.weight)`, `weight.norm()` in a loss,
# `nn.init` and in-place edits just work. With several ranks a fetch is a collective: all ranks must run the same
# function.


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

    # Scripts for DeepSpeed read these of a parameter that `gemini.deepspeed` has marked with a `ds_id`.

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Where the values are. Local. Raises AttributeError where nobody has marked the parameter."""
        if "ds_id" not in vars(self):
            raise AttributeError("ds_status")
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> NoReturn:
        """Not there. Raises AttributeError, which says what to use."""
        raise AttributeError(
            f"parameter {known_link_of(self).managed.name!r} has no 'ds_tensor': its part of a chunk moves. "
            "gemini.safe_get_local_fp32_param(parameter) is this rank's part, safe_set_local_fp32_param sets it"
        )

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
    with ExitStack() as stack:
        first = args[0] if args else kwargs.get("tensor")  # nn.init gives it by keyword
        # `a.copy_(b)` reads `b`, so nothing may be skipped where a second parameter is an argument.
        overwrites = len(found) == 1 and first is found[0] and name_of(func) in OVERWRITES
        detached = all(isinstance(tensor, LazyDetach) for tensor in found)
        for its_links in by_owner(links):
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


# -- Operations on released parameters for which torch calls no `__torch_function__`; see [Note: Guarded placeholders].
#
# C++ functions that take a tensor as a number or as data reach the dispatcher with the parameter itself. It is fetched
# for them as for any other function. If torch would pass its memory on instead, the operation is refused.


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


_guards: list[torch.library.Library] = []  # a registration ends with its object
_guarding = threading.Lock()


def guard_placeholders() -> None:
    """Register `_answer` with torch, once in this process, for the first model: it takes 10 ms."""
    # torch refuses a second fallback: two threads may wrap their first models at once.
    with _guarding:
        if not _guards:
            # torch takes a fallback for the namespace `_` only, which stands for all of them.
            library = torch.library.Library("_", "IMPL")
            library.fallback(_answer, GUARD)
            _guards.append(library)
