"""What `optimizer.state[p]["exp_avg"]` returns: a whole copy of a state, writes to which reach the state.

The copy has memory of its own, so reads are local. A function that gets it is called with a plain tensor of the same
memory, and the schemas of its operations tell whether it wrote (`Writes`): the state then takes the values, each rank
its own part. Views of the copy do the same. A copy that a step has made stale refuses a write: the state would fall
back to what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemini.access.functions import Writes, name_of
from gemini.errors import GeminiError, UnsupportedError
from gemini.runtime.binding import shares_memory


@dataclass(eq=False)
class KeptCopy:
    """A copy of one state, as it was when it was read."""

    what: str  # "'exp_avg' of 'layers.0.weight'"
    whole: Tensor
    write: Callable[[Tensor], None]  # sets the state
    stamp: Callable[[], object]  # equal as long as nothing else has changed the state

    def __post_init__(self) -> None:
        self._stamp = self.stamp()

    def bring_home(self) -> None:
        """The copy was written to: the state takes its values. Raises GeminiError if a step has changed the state."""
        if self.stamp() != self._stamp:
            raise GeminiError(
                f"optimizer.state: {self.what} has changed since this tensor was read, and a write to it would undo "
                "that: read optimizer.state[parameter] again"
            )
        self.write(self.whole)
        self._stamp = self.stamp()


class KeptState(Tensor):
    """A tensor over the memory of a `KeptCopy`, or over a part of it."""

    _copy: KeptCopy

    def _show(self, copy: KeptCopy) -> None:
        """Show memory of this copy. Once, in place of `__init__`: torch has made the tensor."""
        self._copy = copy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        return _call(func, args, kwargs or {}) if special is None else special(*args, **(kwargs or {}))


def shown(copy: KeptCopy, tensor: Tensor | None = None) -> Tensor:
    """The copy, or a view of it, as users get it."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        kept: KeptState = (copy.whole if tensor is None else tensor).as_subclass(KeptState)
    kept._show(copy)
    return kept


def plain(value: Any) -> Any:
    """`value` as an ordinary tensor over the same memory, if it is a kept state."""
    if not isinstance(value, KeptState):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with ordinary tensors, and bring home what it wrote."""
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, KeptState)]
    copies = list({id(each._copy): each._copy for each in found}.values())
    tensors = [plain(each) for each in found]
    geometry = [(each.shape, each.stride()) for each in tensors]
    writes = Writes(copy.whole for copy in copies)
    result = writes.call(func, args, kwargs, KeptState, tensors)
    for each, tensor, before in zip(found, tensors, geometry, strict=True):
        if (tensor.shape, tensor.stride()) != before:
            raise UnsupportedError(f"{name_of(func)} would change the shape of {each._copy.what}: use a clone() of it")
    for position in sorted(writes.written):
        copies[position].bring_home()

    def returned(tensor: Tensor) -> Tensor:
        for each, its in zip(found, tensors, strict=True):
            if tensor is its:
                return each
        # A view of the copy notices writes, too; other results are ordinary tensors.
        owner = next((copy for copy in copies if shares_memory(tensor, copy.whole)), None)
        return tensor if owner is None or type(tensor) is not Tensor else shown(owner, tensor)

    with torch._C.DisableTorchFunctionSubclass():  # parameters may be among the results
        return pytree.tree_map_only(Tensor, returned, result) if found else result


def _set_data(kept: KeptState, value: Tensor) -> None:
    with torch.no_grad():
        kept.copy_(value)


def _refuse(name: str, kept: KeptState, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(f"{name} of {kept._copy.what} would be a write that nobody hears of: use copy_()")


_T: Any = Tensor
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _T.data.__set__: _set_data,
    **{getattr(_T, name): partial(_refuse, name) for name in ("set_", "resize_", "__dlpack__", "share_memory_")},
}
