"""Operators' forward hooks, which come off their modules while all that operators need stays where it is.

torch calls a module without hooks directly; with hooks, even with ones that do nothing, a small module's forward takes
half as long again. So they are lifted inside the root's forward where no payload of a model leaves before the next
update: see [Note: Resident models] in gemini/model/hooks.py. Outside of it they are in place, for modules that are
called on their own.

[Note: Lifted hooks] To lift a hook means to give the module another, empty dict of hooks, as long as it has no other
hook of that kind: taking the hook out of the dict and putting it back touches four times the memory, which of thousands
of modules is in no cache. A hook that a user registers meanwhile is in the other dict, which its handle knows. So the
module keeps that one, and our hook joins it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_Hooks = OrderedDict[int, Callable[..., Any]]
_Row = tuple[dict[str, Any], str, _Hooks, _Hooks, int, Callable[..., Any]]
"""A module's attributes, the name of its hooks of a kind, these with ours, others without it, our key, our hook."""
_BEFORE = "_forward_pre_hooks"
_AFTER = "_forward_hooks"


class OperatorHooks:
    """The hooks of all operators of one model."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._rows: list[_Row] = []  # of hooks that may be lifted
        self._are_lifted = False

    def add(self, module: nn.Module, before: Callable[..., None], after: Callable[..., Any], may_lift: bool) -> None:
        """Install hooks around a module's forward, before and after the user's own."""
        # noted at once: an interrupt in between would leave a hook that nobody removes
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True, with_kwargs=True))
        if may_lift:
            attributes = vars(module)
            for name, handle, hook in zip((_BEFORE, _AFTER), self._handles[-2:], (before, after), strict=True):
                self._rows.append((attributes, name, attributes[name], OrderedDict(), handle.id, hook))

    def lift(self) -> bool:
        """Take the hooks off; what torch notes beside a hook (`always_call`) stays. False if they are off already."""
        if self._are_lifted:
            return False
        self._are_lifted = True
        for attributes, name, hooks, others, key, _ in self._rows:
            if len(hooks) == 1 and key in hooks and attributes[name] is hooks:  # see [Note: Lifted hooks]
                attributes[name] = others
            else:
                hooks.pop(key, None)
        return True

    def put_back(self) -> None:
        """Undo `lift`, before and after what a user has registered meanwhile."""
        if not self._are_lifted:
            return
        for number, (attributes, name, hooks, others, key, hook) in enumerate(self._rows):
            if attributes[name] is not others:
                _put(hooks, name, key, hook)
            elif not others:
                attributes[name] = hooks
            else:
                _put(others, name, key, hook)
                self._rows[number] = attributes, name, others, OrderedDict(), key, hook
        self._are_lifted = False  # last: what is interrupted in here is done again

    @property
    def handles(self) -> tuple[RemovableHandle, ...]:
        """Of all of them."""
        return tuple(self._handles)

    def remove(self) -> None:
        """Remove them for good."""
        self.put_back()
        for _, _, hooks, _, key, _ in self._rows:
            hooks.pop(key, None)  # which its handle does not find in the other dict
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._rows.clear()


def _put(hooks: _Hooks, name: str, key: int, hook: Callable[..., Any]) -> None:
    """Our hook among the user's."""
    hooks[key] = hook
    if name == _BEFORE:
        hooks.move_to_end(key, last=False)
