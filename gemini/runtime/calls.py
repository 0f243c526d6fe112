"""Which operators run now, the hooks around them, and what they pin."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.errors import GeminiError
from gemini.placement.payload_rules import PayloadRules
from gemini.runtime.chunk import Chunk

# -- Operators' forward hooks, which are lifted off their modules while all parameters stay on the device.
#
# torch calls a module without hooks directly. With hooks, even ones that do nothing, a small module's forward takes
# half as long again. So they are lifted inside the root's forward if no payload leaves before the next update: see
# [Note: Resident models] in gemini/model/hooks.py. Outside of it they are in place, for modules that are called on
# their own.
#
# [Note: Lifted hooks] A hook is lifted by giving the module another, empty dict of hooks, as long as it has no other
# hook of that kind. Taking the hook out of the dict and putting it back would touch four times the memory, which for
# thousands of modules is in no cache. A hook that a user registers meanwhile is in the other dict, which its handle
# refers to. Then the module keeps that dict, and our hook joins it.


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


# -- Operators, and the calls of them and of their model that run at this moment, by thread.
#
# [Note: Ended calls] torch runs no forward hook of a call that ended with a KeyboardInterrupt: even hooks registered
# with always_call=True run after an `Exception` only. What a pre-hook began for such a call must therefore be ended
# elsewhere. `ShardedModel.forward` does so at once. For a call that the user made directly (`model.module(x)`,
# `model.generate(...)`), the next use of the model does: the outermost call of a thread keeps its frame, which tells
# whether it still runs.


_SavedTensorHooks = torch.autograd.graph.saved_tensors_hooks
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

    __slots__ = (
        "caches_autocast",
        "frame",
        "hooks",
        "is_outermost",
        "lifted",
        "operator",
        "pinned",
        "recomputes",
        "watch",
    )

    def __init__(
        self, operator: Operator | None, recomputes: bool, is_outermost: bool, frame: FrameType | None = None
    ) -> None:
        """frame: of the call, if it is a thread's outermost one."""
        self.operator = operator
        self.recomputes = recomputes  # it runs inside a backward
        self.is_outermost = is_outermost  # of its thread
        self.frame = frame
        self.pinned: list[Chunk] = []
        self.hooks: _SavedTensorHooks | None = None  # saved-tensor hooks that were pushed for this call
        self.lifted: OperatorHooks | None = None  # operators' hooks that were lifted for this call
        self.caches_autocast: bool | None = None  # setting of autocast's weight cache to restore
        self.watch: AbstractContextManager[object] | None = None  # notices writes through `.data`

    def note_hooks(self, hooks: _SavedTensorHooks) -> None:
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

    def end(self, rules: PayloadRules, late: bool = False, is_here: bool = True) -> None:
        """End what was in force for the call, and its pins. Afterwards it has none.

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
        # Pins of another thread's call can be lifted from here, unlike its hooks: they are the model's.
        rules.unpin([chunk.index for chunk in self.pinned])
        self.pinned.clear()


class Calls:
    """The running calls of one model, outermost first."""

    def __init__(self, rules: PayloadRules) -> None:
        self._rules = rules
        self.by_thread: dict[int, list[Call]] = {}  # has only threads with a running call

    @property
    def num_forwards(self) -> int:
        """Number of nested calls of the model itself."""
        return sum([call.operator is None for calls in self.by_thread.values() for call in calls])

    def depth(self) -> int:
        """Number of nested calls in this thread."""
        return len(self.by_thread.get(get_ident(), ()))

    def enter(self, operator: Operator | None, recomputes: bool) -> Call:
        """Begin a call. Raises GeminiError, before anything has begun, while another thread is inside one.

        recomputes: the call runs inside a backward, which has threads of its own.
        """
        thread = get_ident()
        calls = self.by_thread.get(thread)
        if calls is not None:
            call = Call(operator, recomputes, is_outermost=False)
            calls.append(call)
        # Pins and positions are the model's, not a thread's: two forwards at once would mix them.
        elif self.by_thread and not recomputes:
            raise other_thread("a forward")
        else:
            call = Call(operator, recomputes, is_outermost=True, frame=_frame_of_call())
            self.by_thread[thread] = [call]
        return call

    def exit(self, operator: Operator | None) -> list[Chunk] | None:
        """End this thread's innermost call of `operator`, and the calls inside it that no hook has ended.

        Returns the chunks that these calls had pinned; None if there was no such call.
        """
        thread = get_ident()
        calls = self.by_thread.get(thread, [])
        # torch runs the hook after a call also if `enter` has refused the call.
        if operator not in [call.operator for call in calls]:
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
        call.end(self._rules, late, is_here=thread == get_ident())
        if len(calls) > 1:
            calls.pop()
        else:
            del self.by_thread[thread]

    def still_run(self) -> bool:
        """Whether some thread's outermost call still runs. See [Note: Ended calls]."""
        # Other threads may begin or end calls meanwhile: the loop has a copy. Calls inside of the outermost one end
        # before it.
        return any(_runs(calls[0].frame) for calls in list(self.by_thread.values()))


def _frame_of_call() -> FrameType | None:
    """The frame of the module's call whose pre-hook is asking."""
    frame: FrameType | None = sys._getframe(2)
    # Every call of a module passes through a function of this name: torch's own, or that of `CompiledCall`.
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame


def _runs(frame: FrameType | None) -> bool:
    """Whether a function is not over. If it is, its locals are dropped, among them what it was called with."""
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:  # it cannot be cleared while it runs, in whichever thread
        return True
    return False


def _remove(hooks: _SavedTensorHooks) -> None:
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
    frames = sys._current_frames()
    # Our own frame in this dict would be a cycle, which keeps what our callers refer to, such as whole graphs.
    frames[get_ident()] = sys._getframe(1)
    stacks = map(walk_stack, frames.values())
    # `backward()` and `autograd.grad()` both run autograd's engine inside this function of torch.
    return any(frame.f_code.co_name == "_engine_run_backward" for stack in stacks for frame, _ in stack)


def other_thread(what: str) -> GeminiError:
    """The error for a second thread that uses the model; `what` the first thread is inside of."""
    return GeminiError(
        f"another thread is inside {what} of this model: threads that share a model take turns. Hold a lock from "
        "forward to step(), or give each thread a model of its own"
    )


# -- Tracks what is under way in a model at this moment, and the pins that it holds. See [Note: Pins] in step.py.


_graph_task_id = torch._C._current_graph_task_id
_autograd_node = torch._C._current_autograd_node

# Of one pass: this many forwards do not wait for a common backward, so the next one begins a new pass.
_MOST_FORWARDS = 64


class TouchingCall:
    """A function that touches released parameters. Its frame alone holds this, so an interrupt cannot leave it open."""

    __slots__ = ("__weakref__", "pinned")

    def __init__(self) -> None:
        self.pinned: list[Chunk] = []

    def note_pin(self, chunk: Chunk) -> None:
        """The function has pinned the chunk, until it ends."""
        self.pinned.append(chunk)

    def note_unpinned(self) -> None:
        """Nothing of what the function had pinned is pinned any more."""
        self.pinned.clear()


class Underway:
    """Running calls, functions that touch released parameters, autograd nodes, and the leaf that backward is in.

    A node's pins last until another node of the same graph task asks for something.
    """

    def __init__(self, rules: PayloadRules) -> None:
        self._rules = rules
        self.calls = Calls(rules)
        self.leaf_operator: Operator | None = None  # the leaf that backward is in; all its chunks are in `leaf`
        self.leaf: list[Chunk] = []
        self.awaits_backward = False  # a forward with gradients has had no backward yet
        self._num_forwards = 0  # forwards with gradients of the running pass
        self._has_begun = False  # the forward that was entered last has begun, with gradients
        self._touches: list[weakref.ref[TouchingCall]] = []

    def enter_forward(self) -> None:
        """A forward is entered. It may be refused before it begins."""
        # A forward that is refused before `begin_forward` belongs to no pass: `fail_forward` must not end one for it.
        self._has_begun = False

    def begin_forward(self) -> bool:
        """Count a forward with gradients. True if it begins a pass: the last pass had its backward, or will have none.

        A script that evaluates with gradients never calls backward, and its pass would grow for ever.
        """
        self._num_forwards += 1
        self._has_begun = True
        if self.awaits_backward and self._num_forwards <= _MOST_FORWARDS:
            return False
        self.awaits_backward, self._num_forwards = True, 1
        return True

    def fail_forward(self) -> int:
        """The forward that was entered last has failed. Returns the number of its pass's forwards, 0 without a pass.

        A pass whose only forward failed is over.
        """
        if not self._has_begun or not self.awaits_backward:
            return 0
        self.awaits_backward = self._num_forwards > 1
        return self._num_forwards

    def begin_touch(self) -> TouchingCall:
        """A function begins. It notes in the returned object which chunks it pins, and holds that until its end."""
        touch = TouchingCall()
        self._touches.append(weakref.ref(touch))
        return touch

    def unpin_touch(self, touch: TouchingCall) -> bool:
        """Lift a function's pins; `end_touch` is next. False if a failure has ended it meanwhile."""
        is_open = any(reference() is touch for reference in self._touches)
        if is_open:
            self._rules.unpin([chunk.index for chunk in touch.pinned])
            touch.note_unpinned()
        return is_open

    def end_touch(self, touch: TouchingCall) -> None:
        """A function has ended."""
        # References that are dead stay in the list: they tell `has_lost_touch` of a function that was interrupted.
        self._touches = [reference for reference in self._touches if reference() is not touch]

    @property
    def is_touched(self) -> bool:
        """Whether a function uses parameters outside their operators."""
        return any(reference() is not None for reference in self._touches)

    @property
    def has_lost_touch(self) -> bool:
        """A function was interrupted before its end: nobody holds its call. `forget_forward` lifts its pins."""
        return any(reference() is None for reference in self._touches)

    def follow_node(self) -> None:
        """If another autograd node runs now, lift the pins of the last one and of graph tasks started inside it."""
        task = _graph_task_id()
        if task != -1 and self._rules.nodes:
            self._rules.follow_node(task, _autograd_node())

    def pin_for_leaf(self, chunk: Chunk) -> None:
        """Pin a chunk of the leaf that backward is about to enter. Call `exit_leaf` before the first."""
        self._rules.pin(chunk.index)
        self.leaf.append(chunk)

    def enter_leaf(self, operator: Operator) -> None:
        """Backward is in this leaf, all of whose chunks are pinned."""
        self.leaf_operator = operator

    def exit_leaf(self) -> None:
        """Lift the leaf's pins: backward asks for something outside of it."""
        self._rules.unpin([chunk.index for chunk in self.leaf])
        # Without an operator the next output of the same leaf enters it again.
        self.leaf_operator, self.leaf = None, []

    def exit_backward(self) -> None:
        """Lift all pins of backward: of its nodes and of a leaf."""
        self.exit_leaf()
        self._rules.lift_nodes()

    def end_backward(self) -> None:
        """The backward that the pass's forwards waited for is done: the next forward begins a pass."""
        self.awaits_backward = False

    def forget_forward(self) -> None:
        """Leave only the pins of touching functions: no call runs, and an interrupt may have lost the record of one."""
        # A function may run around all of this, such as the body of `GatheredParameters`: its chunks stay pinned.
        touches = [touch for reference in self._touches if (touch := reference()) is not None]
        self._rules.reset_pins(chunk.index for touch in touches for chunk in touch.pinned)
        self._touches = [weakref.ref(touch) for touch in touches]
        self.awaits_backward = False

    def reset(self) -> None:
        """Forget everything that was under way, and lift all pins."""
        # Calls go first: if `forget_forward` had set the pins to zero before, the end of a call would lift one too
        # many.
        self.calls.end_all()
        self._touches = []
        self.leaf_operator, self.leaf = None, []
        self.forget_forward()
