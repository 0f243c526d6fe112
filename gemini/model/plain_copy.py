"""`copy.deepcopy` of a sharded model, of the module in it or of a part of that.

The copy is plain and whole, in host memory, and has nothing of ours in it. Each module of a sharded model has a
`__deepcopy__` of its own in its `__dict__`, which `copy.deepcopy` calls: hooks of ours would otherwise be copied, and
drive the executor of the original.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.executor.executor import Executor
from gemini.model.hooks import Hooks
from gemini.model.link import link_of

_ATTRIBUTE = "__deepcopy__"


class PlainCopies:
    """Makes copies of the modules of one model."""

    def __init__(self, executor: Executor, hooks: Hooks) -> None:
        self._executor = executor
        self._hooks = hooks
        self._modules: list[weakref.ref[nn.Module]] = []

    def install(self, root: nn.Module) -> None:
        for module in root.modules():
            reference = weakref.ref(module)
            vars(module)[_ATTRIBUTE] = _Copier(self, reference)
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
        if memo.get(id(self)) is self:  # a module around this one is being copied
            return self._copied(module, memo)
        memo[id(self)] = self
        with self._executor.publishing():
            self._executor.check_idle("copy.deepcopy()")
            links = [link for parameter in module.parameters() if (link := link_of(parameter)) is not None]
            for link in sorted(links, key=lambda link: link.managed.index):  # chunk by chunk
                link.deepcopy(memo)
            _leave_out(self._hooks.handles, memo)
            return self._copied(module, memo)

    def _copied(self, module: nn.Module, memo: dict[int, Any]) -> Any:
        for buffer in module.buffers(recurse=False):
            memo.setdefault(id(buffer), buffer.detach().to("cpu", copy=True))
        copier = vars(module).pop(_ATTRIBUTE)  # the copy has none, and a `__deepcopy__` of the module's class is called
        try:
            return copy.deepcopy(module, memo)
        finally:
            vars(module)[_ATTRIBUTE] = copier


class _Copier:
    """A module's `__deepcopy__`."""

    def __init__(self, copies: PlainCopies, module: weakref.ref[nn.Module]) -> None:
        self._copies = copies
        self._module = module

    def __call__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        assert module is not None, "the attribute of a module that is gone"
        return self._copies.of(module, memo)


def _leave_out(handles: Iterable[RemovableHandle], memo: dict[int, Any]) -> None:
    """Dictionaries of hooks are copied without ours: those would drive the executor of the original."""
    found: dict[int, tuple[dict[int, Any], set[int]]] = {}
    for handle in handles:
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks = reference()
            if hooks is not None:
                found.setdefault(id(hooks), (hooks, set()))[1].add(handle.id)
    for key, (hooks, _) in found.items():
        memo[key] = type(hooks)()
    # a hook of the user's may be a method of a module, which is copied with it: by now nothing of ours is reached
    for key, (hooks, ours) in found.items():
        memo[key].update({number: copy.deepcopy(hook, memo) for number, hook in hooks.items() if number not in ours})
