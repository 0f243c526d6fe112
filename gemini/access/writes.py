"""Finds which of some tensors a function writes to, by the schemas of the operations that it is made of.

Version counters do not tell: `torch._foreach_mul_` and similar functions do not raise them where they run as one
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.manager.snapshots import shares_memory


class Writes(TorchDispatchMode):
    """While active, notes which of `tensors` operations write to, in whole or through a view."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.written: set[int] = set()  # by position
        self._tensors = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.numel()]

    def note_write(self, position: int) -> None:
        """The tensor at `position` was written to in a way that no operation reports."""
        self.written.add(position)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Operators of higher order, such as `torch.cond`, have no schema.
        schema = getattr(func, "_schema", None)
        for place, argument in enumerate(() if schema is None else schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            # An argument may be a list of tensors, as in `_foreach_` functions.
            for target in pytree.tree_leaves(given):
                if isinstance(target, Tensor):
                    self.written.update(i for i, tensor in self._tensors if shares_memory(target, tensor))
        return func(*args, **kwargs)
