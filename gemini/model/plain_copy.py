"""`copy.deepcopy` of a sharded model: the plain module, whole, in host memory, without anything of ours in it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.executor.executor import Executor
from gemini.model.weights import whole_parameters


def plain_copy(
    module: nn.Module, executor: Executor, handles: Iterable[RemovableHandle], memo: dict[int, Any]
) -> nn.Module:
    """A copy of `module` with whole CPU tensors for parameters and buffers, without the hooks of `handles`. Collective.

    memo: of the `copy.deepcopy` that is under way; tied parameters stay tied through it.
    """
    executor.check_idle("copy.deepcopy()")
    wholes = whole_parameters(executor, executor.chunks)
    for chunk in executor.chunks:
        for managed in chunk.parameters:
            with torch._C.DisableTorchFunctionSubclass():
                flag = managed.parameter.requires_grad
            memo[id(managed.parameter)] = nn.Parameter(wholes.pop(managed.index), requires_grad=flag)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    _leave_out(handles, memo)
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied


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
