"""`copy.deepcopy` of a sharded model, of the module in it or of a part of that.

The copy is plain and whole, in host memory, and has nothing of ours in it: hooks of ours would drive the steps of
the original. A module of a sharded model therefore has a `__reduce_ex__` in its `__dict__`, where `copy.deepcopy` and
pickle look for one. Not a `__deepcopy__`: nn.Module has none, so a wrapper that hands unknown attributes on to the
module in it, as peft's do, would be copied by way of that module's.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, NoReturn

from torch import nn

from gemini.access.link import link_of
from gemini.errors import UnsupportedError
from gemini.manager.step import Step
from gemini.model.hooks import Handles

_ATTRIBUTE = "__reduce_ex__"


class PlainCopies:
    """Makes copies of the modules of one model."""

    def __init__(self, step: Step, handles: Handles) -> None:
        """handles: of the hooks that no copy has."""
        self._step = step
        self._handles = handles
        self._modules: list[weakref.ref[nn.Module]] = []

    def install(self, root: nn.Module) -> None:
        for module in root.modules():
            reference = weakref.ref(module)
            vars(module)[_ATTRIBUTE] = _Reduces(self, reference)
            self._modules.append(reference)

    def remove(self) -> None:
        """The modules are copied as any others again."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                vars(module).pop(_ATTRIBUTE, None)
        self._modules.clear()

    def of(self, module: nn.Module, memo: dict[int, Any]) -> Any:
        """A copy of `module` with whole CPU tensors for parameters and buffers, without our hooks. Collective.

        memo: of the `copy.deepcopy` that is under way; tied parameters stay tied through it.
        """
        with self._step.publishing():
            self._step.check_idle("copy.deepcopy()")
            links = {link.managed.index: link for p in module.parameters() if (link := link_of(p)) is not None}
            for index in sorted(links):  # chunk by chunk
                key = id(links[index].managed.parameter)
                if key not in memo:
                    memo[key] = links[index].copy()
            for buffer in module.buffers():
                memo.setdefault(id(buffer), buffer.detach().to("cpu", copy=True))
            _leave_out(self._handles, memo)
            ours = [(each, vars(each).pop(_ATTRIBUTE)) for each in module.modules() if _ATTRIBUTE in vars(each)]
            try:
                return copy.deepcopy(module, memo)
            finally:
                for each, reduces in ours:
                    vars(each)[_ATTRIBUTE] = reduces


class _Reduces:
    """A module's `__reduce_ex__`."""

    def __init__(self, copies: PlainCopies, module: weakref.ref[nn.Module]) -> None:
        self._copies = copies
        self._module = module

    def __call__(self, protocol: Any) -> Any:
        module = self._module()
        assert module is not None, "the attribute of a module that is gone"
        return _itself, (_Copied(self._copies, module),)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """The module's class has a `__deepcopy__` that copies what the module has."""
        raise UnsupportedError(
            "this module copies itself, with hooks of its ShardedModel: copy.deepcopy(model) instead"
        )


class _Copied:
    """Is copied as the plain module: `copy.deepcopy` copies what a `__reduce_ex__` returned, and hands its memo on."""

    def __init__(self, copies: PlainCopies, module: nn.Module) -> None:
        self._copies = copies
        self._module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._copies.of(self._module, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "a module in a ShardedModel cannot be pickled: save its state_dict(), or a copy.deepcopy() of it"
        )


def _itself(module: nn.Module) -> nn.Module:
    return module


def _leave_out(handles: Handles, memo: dict[int, Any]) -> None:
    """Dictionaries of hooks are copied without ours: those would drive the steps of the original."""
    found: dict[int, tuple[dict[int, Any], set[int]]] = {}
    for handle in (*handles.of_operators, *handles.of_others):
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks = reference()
            if hooks is not None:
                found.setdefault(id(hooks), (hooks, set()))[1].add(handle.id)
    found = {key: each for key, each in found.items() if key not in memo}  # else copied with a module before
    for key, (hooks, _) in found.items():
        memo[key] = type(hooks)()
    # a hook of the user's may be a method of a module, which is copied with it: by now nothing of ours is reached
    for key, (hooks, ours) in found.items():
        memo[key].update({number: copy.deepcopy(hook, memo) for number, hook in hooks.items() if number not in ours})
