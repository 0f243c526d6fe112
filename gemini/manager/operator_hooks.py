"""Operators' forward hooks, which are lifted off their modules while all parameters stay on the device.

torch calls a module without hooks directly. With hooks, even ones that do nothing, a small module's forward takes half
as long again. So they are lifted inside the root's forward if no payload leaves before the next update:
see [Note: Resident models] in gemini/model/hooks.py. Outside of it they are in place, for modules that are called on
their own.

[Note: Lifted hooks] A hook is lifted by giving the module another, empty dict of hooks, as long as it has no other hook
of that kind. Taking the hook out of the dict and putting it back would touch four times the memory, which for thousands
of modules is in no cache. A hook that a user registers meanwhile is in the other dict, which its handle refers to. Then
the module keeps that dict, and our hook joins it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_Hooks = OrderedDict[int, Callable[..., Any]]
_Row = tuple[dict[str, Any], str, _Hooks, _Hooks, int, Callable[..., Any]]
"""(module's attributes, name of a dict of hooks in them, the dict with our hook, one without, our key, our hook)."""
_BEFORE = "_forward_pre_hooks"
_AFTER = "_forward_hooks"


class OperatorHooks:
    """The hooks of all operators of one model."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        """handles: an empty list, which from now on has the handles of all of them."""
        self._handles = handles
        self._rows: list[_Row] = []  # of hooks that may be lifted
        self._are_lifted = False
        self._last: int | None = None  # torch's number of the hook that runs behind all others

    def add(self, module: nn.Module, before: Callable[..., None], after: Callable[..., Any], may_lift: bool) -> None:
        """Install hooks around a module's forward: `before` runs before the user's own, `after` after them."""
        # Each handle is noted at once: an interrupt in between would leave a hook that nothing removes.
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True, with_kwargs=True))
        if may_lift:
            attributes = vars(module)
            for name, handle, hook in zip((_BEFORE, _AFTER), self._handles[-2:], (before, after), strict=True):
                self._rows.append((attributes, name, attributes[name], OrderedDict(), handle.id, hook))

    def add_last(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Install a hook that runs behind the module's others, also after an exception. `keep_last` keeps it there."""
        self._handles.append(module.register_forward_hook(hook, always_call=True))
        self._last = self._handles[-1].id

    def keep_last(self, module: nn.Module) -> None:
        """Move the hook of `add_last` behind hooks that users have registered since."""
        hooks: Any = module._forward_hooks  # torch makes an OrderedDict, and calls it a dict
        # Only where it has to move: a hook of the user's may call the module, while torch iterates over the dict.
        if self._last in hooks and next(reversed(hooks)) != self._last:
            hooks.move_to_end(self._last)

    def lift(self) -> bool:
        """Take the hooks off; what torch notes beside a hook (`always_call`) stays. False if they are off already."""
        if self._are_lifted:
            return False
        self._are_lifted = True
        for attributes, name, hooks, others, key, _ in self._rows:
            if len(hooks) == 1 and key in hooks and attributes[name] is hooks:  # see [Note: Lifted hooks]
                attributes[name] = others
            else:
                # The user has hooks of this kind: only ours is taken out.
                hooks.pop(key, None)
        return True

    def put_back(self) -> None:
        """Undo `lift`. Our hooks run before, and after, those that a user has registered meanwhile."""
        if not self._are_lifted:
            return
        # Three cases: our hook was taken out of a dict that it shares with a user's; the module has the empty dict; a
        # user's hook has come into that one meanwhile.
        for number, (attributes, name, hooks, others, key, hook) in enumerate(self._rows):
            if attributes[name] is not others:
                _put(hooks, name, key, hook)
            elif not others:
                attributes[name] = hooks
            else:
                # A user has registered hooks in the other dict meanwhile: that one stays, and a new empty one is for
                # the next `lift`.
                _put(others, name, key, hook)
                self._rows[number] = attributes, name, others, OrderedDict(), key, hook
        # Written last: after an interrupt in this method it is called again.
        self._are_lifted = False

    def remove(self) -> None:
        """Remove all hooks for good."""
        self.put_back()
        for _, _, hooks, _, key, _ in self._rows:
            # A handle knows only the dict that its hook was registered in: `put_back` may have moved the hook to
            # another.
            hooks.pop(key, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._rows.clear()


def _put(hooks: _Hooks, name: str, key: int, hook: Callable[..., Any]) -> None:
    """Put our hook among the user's: first of the pre-hooks, last of the others."""
    hooks[key] = hook
    if name == _BEFORE:
        hooks.move_to_end(key, last=False)
