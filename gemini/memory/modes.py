"""Keeps our operations out of the user's dispatch modes and function transforms.

[Note: Modes] Selective checkpointing is a pair of dispatch modes: one counts and keeps the results of a region's
operations, the other returns results by that count when the region is recomputed. Our copies and collectives differ
between the two passes. A mode that met them would return a result for another operation, or skip a copy. Modes that
surround a whole step to watch it (counters of memory or FLOPs) keep seeing our operations. A mode says which of the two
it is by `ignore_compile_internals`. The transforms of `torch.func` wrap every tensor that is made inside them, so our
memory must not be made there either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _python_dispatch as dispatch

num_modes = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes. Without any, and without transforms, `unseen` changes nothing."""
are_transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` is active."""
_autograd: Any = torch._C._autograd
_SEEN: AbstractContextManager[None] = nullcontext()


def unseen() -> AbstractContextManager[None]:
    """A context in which operations are hidden from the user's modes and transforms, see [Note: Modes]."""
    if not num_modes() and not are_transforms_active():
        # The usual case, for every tensor that backward unpacks: no context is built.
        return _SEEN
    return _alone()


class untracked:
    """Inside, autograd records nothing, and new tensors may be used in training, also in inference mode.

    It equals `torch.inference_mode(False)` with `torch.no_grad()`, in a seventh of their calls: every fetch needs both.
    """

    __slots__ = ("_grad_mode", "_inference_mode")

    def __enter__(self) -> None:
        self._grad_mode = torch.is_grad_enabled()
        self._inference_mode: Any = None
        # Outside of inference mode the guard would change nothing. After an interrupt in here it would live as long as
        # the traceback, and then set torch's modes to what they were.
        if torch.is_inference_mode_enabled():
            self._inference_mode = torch._C._InferenceMode(False)
            self._inference_mode.__enter__()
        # This comes last: leaving inference mode switches autograd on.
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        if self._inference_mode is not None:
            self._inference_mode.__exit__(*error)
        torch._C._set_grad_enabled(self._grad_mode)


def _follows_the_user(mode: dispatch.TorchDispatchMode) -> bool:
    return bool(mode.ignore_compile_internals())


@contextmanager
def _alone() -> Iterator[None]:
    with ExitStack() as stack:
        if any(map(_follows_the_user, dispatch._get_current_dispatch_mode_stack())):
            stack.enter_context(_without_followers())
        if are_transforms_active():
            stack.enter_context(temporarily_clear_interpreter_stack())
        yield


@contextmanager
def _without_followers() -> Iterator[None]:
    # torch has no call to remove one mode from the middle of the stack: pop all, and push back the watching ones.
    modes = [dispatch._pop_mode() for _ in range(num_modes())]
    kept = [mode for mode in modes if not _follows_the_user(mode)]
    # `modes` begins with the innermost mode, so it is pushed back in reverse.
    for mode in reversed(kept):
        dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            dispatch._pop_mode()
        for mode in reversed(modes):
            dispatch._push_mode(mode)


class unhooked:
    """Inside, no saved-tensor hooks are active.

    A gloo collective keeps the state of the thread that launched it, saved-tensor hooks included, for as long as Python
    refers to the collective. A model that is dropped meanwhile would be kept alive by its own hooks, through a
    reference that the cycle collector cannot follow.
    """

    __slots__ = ("_taken",)

    def __enter__(self) -> None:
        self._taken: list[tuple[Any, Any]] = []
        # With True torch tells of its hooks also while a compiler traces, when it otherwise says that there are none.
        while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            self._taken.append(hooks)

    def __exit__(self, *error: object) -> None:
        for pack, unpack in reversed(self._taken):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of `torch.func` transforms; any other tensor itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
