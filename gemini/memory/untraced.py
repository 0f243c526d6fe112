"""Functions that `torch.compile` must leave as they are.

The compiler looks at every Python function that runs while it is on: also at hooks that autograd calls from the middle
of an operation, wherever it has given up a function around that operation. Ours look up chunks by the memory of real
tensors, which a traced function does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

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
