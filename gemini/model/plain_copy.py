"""`copy.deepcopy` of a sharded model, of the wrapped module, or of a part of it.

The copy is plain and whole, in host memory, without our hooks: copied hooks would drive the steps of the original. It
has the casts around modules of other dtypes than the rest (`ShardedModel(dtype={...})`), without which it cannot run.
Therefore each module of a sharded model has a `__reduce_ex__` in its `__dict__`, where `copy.deepcopy` and pickle look
for it. A `__deepcopy__` would be wrong: `nn.Module` has none, so a wrapper that forwards unknown attributes to its
inner module, as in peft, would be copied by the inner module's method.
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
            # Weak, since the module's own `__dict__` has the object: a strong reference would be a cycle.
            reference = weakref.ref(module)
            vars(module)[_ATTRIBUTE] = _Reduces(self, reference)
            self._modules.append(reference)

    def remove(self) -> None:
        """Remove our `__reduce_ex__` from all modules, which are then copied like any others."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                vars(module).pop(_ATTRIBUTE, None)
        self._modules.clear()

    def of(self, module: nn.Module, memo: dict[int, Any]) -> Any:
        """A copy of `module` with whole CPU tensors for parameters and buffers, without our hooks. Collective.

        memo: the memo of the running `copy.deepcopy`, which keeps tied parameters tied.
        """
        with self._step.publishing():
            self._step.check_idle("copy.deepcopy()")
            links = {link.managed.index: link for p in module.parameters() if (link := link_of(p)) is not None}
            # In the order of chunks, which is the same on all ranks and fetches each chunk once.
            for index in sorted(links):
                key = id(links[index].managed.parameter)
                # The running `copy.deepcopy` may have copied a tied parameter with another part of the model.
                if key not in memo:
                    memo[key] = links[index].copy()
            # Parameters and buffers are in `memo` now, so `copy.deepcopy` takes these copies.
            for buffer in module.buffers():
                memo.setdefault(id(buffer), buffer.detach().to("cpu", copy=True))
            _leave_out(self._handles, memo)
            # Without the attribute `copy.deepcopy` copies the modules as it copies any others. With it, it would come
            # back here.
            ours = [(each, vars(each).pop(_ATTRIBUTE)) for each in module.modules() if _ATTRIBUTE in vars(each)]
            try:
                return copy.deepcopy(module, memo)
            finally:
                for each, reduces in ours:
                    vars(each)[_ATTRIBUTE] = reduces


class _Reduces:
    """The `__reduce_ex__` of one module."""

    def __init__(self, copies: PlainCopies, module: weakref.ref[nn.Module]) -> None:
        self._copies = copies
        self._module = module

    def __call__(self, protocol: Any) -> Any:
        module = self._module()
        assert module is not None, "the attribute of a module that is gone"
        return _itself, (_Copied(self._copies, module),)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse a module class with a `__deepcopy__` of its own, which would copy our hooks with the attributes."""
        raise UnsupportedError(
            "this module copies itself, with hooks of its ShardedModel: copy.deepcopy(model) instead"
        )


class _Copied:
    """What `__reduce_ex__` returns. `copy.deepcopy` copies it with its memo, and gets the plain copy of the module."""

    def __init__(self, copies: PlainCopies, module: nn.Module) -> None:
        self._copies = copies
        self._module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._copies.of(self._module, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "a module in a ShardedModel cannot be pickled: save its state_dict(), or a copy.deepcopy() of it"
        )


def _itself(module: Any) -> nn.Module:
    """What `__reduce_ex__` says to call. Raises UnsupportedError for `copy.copy`, which hands `_Copied` on as it is."""
    if isinstance(module, _Copied):
        raise UnsupportedError(
            "a shallow copy of a module would share parameters and hooks with its ShardedModel: use copy.deepcopy"
        )
    copied: nn.Module = module
    return copied


def _leave_out(handles: Handles, memo: dict[int, Any]) -> None:
    """Dictionaries of hooks are copied without ours: those would drive the steps of the original."""
    found: dict[int, tuple[dict[int, Any], set[int]]] = {}
    for handle in (*handles.of_operators, *handles.of_others):
        # torch notes `always_call` and `with_kwargs` of a hook in further dicts, under the same id.
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks = reference()
            if hooks is not None:
                found.setdefault(id(hooks), (hooks, set()))[1].add(handle.id)
    # A dictionary in `memo` was copied with an earlier module already.
    found = {key: each for key, each in found.items() if key not in memo}
    for key, (hooks, _) in found.items():
        memo[key] = type(hooks)()
    # A user's hook may be a method of a module, and copying it copies that module. `memo` has all dictionaries by now,
    # so none of our hooks is reached.
    for key, (hooks, ours) in found.items():
        memo[key].update({number: copy.deepcopy(hook, memo) for number, hook in hooks.items() if number not in ours})
