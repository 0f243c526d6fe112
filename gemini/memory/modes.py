"""Modes of torch that are off inside of ours, and the collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _python_dispatch as dispatch

# -- Python's cycle collector, switched off where many long-lived objects are made.


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, the cycle collector of this process does not run.

    A collection starts whenever the number of objects has grown by a quarter, and visits all of them. For a plan of
    thousands of chunks, all of whose objects are kept, the collections would take more time than making the objects.
    Our tensors are part of no cycle and are freed as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- Functions that `torch.compile` must leave as they are.
#
# The compiler looks at every Python function that runs while it is on: also at hooks that autograd calls from the
# middle of an operation, wherever it has given up a function around that operation. Ours look up chunks by the memory
# of real tensors, which a traced function does not have.


_eval_frame: Any = torch._C._dynamo.eval_frame  # importing torch._dynamo itself would take a second
_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type[Any])

A_HOOK = "autograd calls this hook, which looks up real memory"
"""A reason for `never_traced`."""


def never_traced(reason: str, calls_too: bool = True) -> Callable[[_F], _F]:
    """Decorate a function that the compiler runs as it is. A call costs what it costs without this.

    reason: what users read in the compiler's own messages.
    calls_too: the functions that this one calls are not compiled either, but for those that `torch.compile` made.

    `torch.compiler.disable` marks a wrapper in the same way, which costs time in every call, and imports the compiler.
    """

    def mark(function: _F) -> _F:
        # Where the compiler traces a caller, these two attributes make it break the graph before the call.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        action = _eval_frame._FrameAction
        # Where the interpreter begins the function itself, the mark is on its code.
        inside = action.SKIP if calls_too else action.DEFAULT
        strategy = _eval_frame._FrameExecStrategy(action.SKIP, inside)
        _eval_frame.set_code_exec_strategy(function.__code__, strategy)
        return function

    return mark


def methods_never_traced(reason: str, *names: str) -> Callable[[_C], _C]:
    """Decorate a class: `never_traced` for those of its methods that a compiled function of the user's may call."""

    def mark(cls: _C) -> _C:
        for name in names:
            never_traced(reason)(vars(cls)[name])
        return cls

    return mark


# -- Keeps our operations out of the user's dispatch modes and function transforms.
#
# [Note: Modes] Selective checkpointing is a pair of dispatch modes: one counts and keeps the results of a region's
# operations, the other returns results by that count when the region is recomputed. Our copies and collectives differ
# between the two passes. A mode that met them would return a result for another operation, or skip a copy. Modes that
# surround a whole step to watch it (counters of memory or FLOPs) keep seeing our operations. A mode says which of the
# two it is by `ignore_compile_internals`. The transforms of `torch.func` wrap every tensor that is made inside them, so
# our memory must not be made there either.


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
