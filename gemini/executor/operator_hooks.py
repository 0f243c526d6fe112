"""Operators' forward hooks, which come off their modules while all that operators need stays where it is.

torch calls a module without hooks directly; with hooks, even with ones that do nothing, a small module's forward takes
half as long again. So they are lifted inside the root's forward where every payload of a model is at home on this rank:
see [Note: Resident models] in gemini/model/hooks.py. Outside of it they are in place, for modules that are called on
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle


class _Hook(NamedTuple):
    """One hook of a module, and the dictionary in which torch looks for it."""

    hooks: Any  # OrderedDict[int, Callable]
    key: int
    hook: Callable[..., Any]


class OperatorHooks:
    """The hooks of all operators of one model."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._before: list[_Hook] = []  # of the modules whose hooks may be lifted
        self._after: list[_Hook] = []
        self._are_lifted = False

    def add(self, module: nn.Module, before: Callable[..., None], after: Callable[..., Any], may_lift: bool) -> None:
        """Install hooks around a module's forward, before and after the user's own."""
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True, with_kwargs=True))
        if may_lift:
            first, last = self._handles[-2:]
            self._before.append(_Hook(module._forward_pre_hooks, first.id, before))
            self._after.append(_Hook(module._forward_hooks, last.id, after))

    def lift(self) -> bool:
        """Take the hooks off; what torch notes beside a hook (`always_call`) stays. False if they are off already."""
        if self._are_lifted:
            return False
        self._are_lifted = True
        for hooks, key, _ in self._before:
            hooks.pop(key, None)
        for hooks, key, _ in self._after:
            hooks.pop(key, None)
        return True

    def put_back(self) -> None:
        """Undo `lift`."""
        if self._are_lifted:
            self._are_lifted = False
            for hooks, key, hook in self._before:
                hooks[key] = hook
                if len(hooks) > 1:
                    hooks.move_to_end(key, last=False)
            for hooks, key, hook in self._after:
                hooks[key] = hook

    @property
    def handles(self) -> tuple[RemovableHandle, ...]:
        """Of all of them."""
        return tuple(self._handles)

    def remove(self) -> None:
        """Remove them for good."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before.clear()
        self._after.clear()
