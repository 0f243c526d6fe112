"""Operators, and the calls of them and of their model that run at this moment, by thread.

[Note: Ended calls] torch runs no forward hook of a call that ended with a KeyboardInterrupt: even hooks registered with
always_call=True run after an `Exception` only. What a pre-hook began for such a call must therefore be ended elsewhere.
`ShardedModel.forward` does so at once. For a call that the user made directly (`model.module(x)`,
`model.generate(...)`), the next use of the model does: it finds that the call's frame is on no thread's stack any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gemini.chunks.chunk import Chunk
from gemini.errors import GeminiError
from gemini.manager.operator_hooks import OperatorHooks
from gemini.manager.victims import Victims

_Hooks = torch.autograd.graph.saved_tensors_hooks
_autograd: Any = torch._C._autograd


@dataclass(eq=False)
class Operator:
    """A module whose chunks are fetched together. `index` is its row in the table of positions.

    routes: ranks may use different parts of it, so backward, too, fetches it whole.
    is_compiled: ranks may have compiled it for different shapes, and their backwards may read its parameters in
        different orders, so backward fetches it whole where parameters are gathered.
    """

    index: int
    name: str
    chunks: tuple[Chunk, ...]
    routes: bool = False
    is_compiled: bool = False


class Call:
    """A call of the model (`operator` is None) or of an operator, and what is in force until it ends."""

    __slots__ = ("caches_autocast", "hooks", "lifted", "module", "operator", "pinned", "watch")

    def __init__(self, module: nn.Module, operator: Operator | None) -> None:
        self.module = module
        self.operator = operator
        self.pinned: list[Chunk] = []
        self.hooks: _Hooks | None = None  # saved-tensor hooks that were pushed for this call
        self.lifted: OperatorHooks | None = None  # operators' hooks that were lifted for this call
        self.caches_autocast: bool | None = None  # setting of autocast's weight cache to restore
        self.watch: AbstractContextManager[object] | None = None  # notices writes through `.data`

    def note_hooks(self, hooks: _Hooks) -> None:
        """Saved-tensor hooks were pushed for the call: its end takes them off."""
        self.hooks = hooks

    def note_lifted(self, lifted: OperatorHooks) -> None:
        """Operators' hooks were lifted for the call: its end puts them back."""
        self.lifted = lifted

    def note_autocast(self, caches: bool) -> None:
        """Autocast's weight cache is about to be turned off: the call's end makes it `caches` again."""
        self.caches_autocast = caches

    def note_watch(self, watch: AbstractContextManager[object]) -> None:
        """The context is about to be entered: the call's end leaves it."""
        self.watch = watch

    def lift_pins(self, victims: Victims) -> None:
        """Lift the call's pins. Afterwards it has none."""
        victims.unpin(self.pinned)
        self.pinned.clear()

    def end(self, late: bool = False, is_here: bool = True) -> None:
        """End what was in force for the call, except its pins.

        late: the user's code has run since, so the hooks may not be on top of torch's stack any more. is_here: the call
        was one of this thread.
        """
        # They are forgotten first: a second exit would take hooks of the user's off torch's stack.
        hooks, self.hooks = self.hooks, None
        # torch has a stack of hooks for each thread: that of another one cannot be reached from here.
        if hooks is not None and is_here:
            if late:
                _remove(hooks)
            else:
                hooks.__exit__()
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
            self.watch = None
        if self.lifted is not None:
            # Put back before it is forgotten: an interrupt in between would leave the hooks off for good.
            self.lifted.put_back()
            self.lifted = None
        if self.caches_autocast is not None:
            torch.set_autocast_cache_enabled(self.caches_autocast)
            self.caches_autocast = None


class Calls:
    """The running calls of one model, outermost first."""

    def __init__(self, victims: Victims) -> None:
        self._victims = victims
        self.by_thread: dict[int, list[Call]] = {}  # has only threads with a running call

    @property
    def num_forwards(self) -> int:
        """Number of nested calls of the model itself."""
        return sum(call.operator is None for calls in self.by_thread.values() for call in calls)

    def depth(self) -> int:
        """Number of nested calls in this thread."""
        return len(self.by_thread.get(get_ident(), ()))

    def enter(self, module: nn.Module, operator: Operator | None, recomputes: bool) -> Call:
        """Begin a call. Raises GeminiError, before anything has begun, while another thread is inside one.

        recomputes: the call runs inside a backward, which has threads of its own.
        """
        thread = get_ident()
        call = Call(module, operator)
        calls = self.by_thread.get(thread)
        if calls is not None:
            calls.append(call)
        # Pins and positions are the model's, not a thread's: two forwards at once would mix them.
        elif self.by_thread and not recomputes:
            raise other_thread("a forward")
        else:
            self.by_thread[thread] = [call]
        return call

    def exit(self, operator: Operator | None) -> list[Chunk] | None:
        """End this thread's innermost call of `operator`, and the calls inside it that no hook has ended.

        Returns the chunks that these calls had pinned; None if there was no such call.
        """
        thread = get_ident()
        calls = self.by_thread.get(thread, [])
        # torch runs the hook after a call also if `enter` has refused the call.
        if not any(call.operator is operator for call in calls):
            return None
        # The list is copied, because the end of a call empties it.
        pinned = list(calls[-1].pinned)
        # Inner calls end first, because torch's saved-tensor hooks are a stack.
        while calls[-1].operator is not operator:
            self._end_innermost(thread)
            pinned += calls[-1].pinned
        self._end_innermost(thread)
        return pinned

    def is_pinned(self, chunk: Chunk) -> bool:
        """Whether a running call pins the chunk."""
        return any(chunk in call.pinned for calls in self.by_thread.values() for call in calls)

    def end_above(self, depth: int) -> bool:
        """End this thread's calls inside the outermost `depth`. False if there are none."""
        found = self.depth() > depth
        while self.depth() > depth:
            self._end_innermost(get_ident())
        return found

    def end_all(self) -> None:
        """End every call of every thread, none of which runs any more."""
        for thread in list(self.by_thread):
            while thread in self.by_thread:
                self._end_innermost(thread, late=True)

    def _end_innermost(self, thread: int, late: bool = False) -> None:
        calls = self.by_thread[thread]
        call = calls[-1]
        # Before the call is forgotten: an interrupt here leaves it in the list, to be ended again.
        call.end(late, is_here=thread == get_ident())
        # Pins of another thread's call can be lifted from here, unlike its hooks: they are the model's.
        call.lift_pins(self._victims)
        if len(calls) > 1:
            calls.pop()
        else:
            del self.by_thread[thread]

    def still_run(self, entering: nn.Module | None = None) -> bool:
        """Whether some thread's outermost call is still on its stack. See [Note: Ended calls].

        entering: the module of a call that is on this thread's stack, but not entered yet.
        """
        here = get_ident()
        frames = _frames()
        # Other threads may begin or end calls meanwhile: the loop has a copy. A thread that has ended has no frame any
        # more.
        for thread, calls in list(self.by_thread.items()):
            # Only the outermost call is looked for, because those inside of it end before it.
            module, operator = calls[0].module, calls[0].operator
            # A module may call itself: compare the number of its frames with the number of its calls.
            entered = sum(call.module is module and call.operator is operator for call in calls)
            entered += thread == here and entering is module
            if thread in frames and _num_calls(walk_stack(frames[thread]), module) >= entered:
                return True
        return False


def _remove(hooks: _Hooks) -> None:
    """Remove hooks from anywhere in this thread's stack of saved-tensor hooks."""
    above: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = []
    found = False
    # With True torch tells of hooks also while a compiler traces, when it otherwise says that there are none.
    while not found and (top := _autograd._top_saved_tensors_default_hooks(True)):
        _autograd._pop_saved_tensors_default_hooks()
        found = top[0] is hooks.pack_hook
        if not found:
            above.append(top)
    # The end of a `with` around the call has popped our hooks in place of its own, which are still on top: drop these.
    if not found:
        above = above[1:]
    for pack, unpack in reversed(above):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)


def backward_runs() -> bool:
    """Whether some thread has called a backward, of whatever graph, that still runs."""
    stacks = map(walk_stack, _frames().values())
    # `backward()` and `autograd.grad()` both run autograd's engine inside this function of torch.
    return any(frame.f_code.co_name == "_engine_run_backward" for stack in stacks for frame, _ in stack)


def _frames() -> dict[int, FrameType]:
    """The innermost frame of every thread by its number; of this thread, the frame that called our caller."""
    frames = sys._current_frames()
    # Our caller keeps this dict in a variable. With its own frame in it that would be a cycle, which keeps what the
    # frames of its callers refer to, such as whole graphs, until the collector of cycles comes by.
    frames[get_ident()] = sys._getframe(2)
    return frames


def other_thread(what: str) -> GeminiError:
    """The error for a second thread that uses the model; `what` the first thread is inside of."""
    return GeminiError(
        f"another thread is inside {what} of this model: threads that share a model take turns. Hold a lock from "
        "forward to step(), or give each thread a model of its own"
    )


def _num_calls(stack: Iterable[tuple[FrameType, int]], module: nn.Module) -> int:
    """The number of calls of `module(...)` on a thread's stack."""
    # Every call of a module passes through a function of this name: torch's own, or that of `CompiledCall`.
    calls = (frame for frame, _ in stack if frame.f_code.co_name == "_call_impl")
    return sum(frame.f_locals.get("self") is module for frame in calls)
