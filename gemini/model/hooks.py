"""Hooks: the places where the module tree and autograd call `Step`. All are removable, none patches a class.

[Note: Root hooks] Saved-tensor hooks are pushed at the root's forward, so that functions between operators are
covered, and again in an operator whenever they are not on top (inside a checkpointed region, under save_on_cpu).
The end of backward is queued from hooks on the root's *outputs*, because these run in the outermost graph task. A
parameter's gradient may arrive in an inner task that reentrant checkpointing started.

[Note: Resident models] If every payload is at home on this rank for good, operators have no hooks inside the root's
forward, and autograd saves tensors as in plain PyTorch: its version counters detect graphs from before an update. The
root makes all parameters plain at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.access.plain_data import Watch
from gemini.access.saved_tensors import SavedTensors
from gemini.access.trainability import Trainability
from gemini.access.transforms import check_operator, hooks_are_allowed
from gemini.errors import GeminiError
from gemini.manager.calls import Call, Operator
from gemini.manager.operator_hooks import OperatorHooks
from gemini.manager.step import Step
from gemini.memory.modes import unseen, untracked
from gemini.memory.untraced import A_HOOK, never_traced
from gemini.model.compiled import CompiledCall
from gemini.model.leaf import reached_by_backward
from gemini.model.tensors import tensors_in


@dataclass(frozen=True)
class Handles:
    """Handles of all hooks that the modules and parameters of one model have because of us."""

    of_operators: list[RemovableHandle] = field(default_factory=list)  # and of the root
    of_others: list[RemovableHandle] = field(default_factory=list)
    of_casts: list[RemovableHandle] = field(default_factory=list)  # which copies of the modules have, too

    def add(self, handles: Iterable[RemovableHandle]) -> None:
        """Have handles of others than operators, too, one by one: where registering fails, those before are known."""
        self.of_others.extend(handles)

    def add_casts(self, handles: Iterable[RemovableHandle]) -> None:
        """As `add`, of casts."""
        self.of_casts.extend(handles)

    def remove_others(self) -> None:
        """Remove the hooks of all others than operators."""
        for handles in (self.of_others, self.of_casts):
            for handle in handles:
                handle.remove()
            handles.clear()


class Hooks:
    """The hooks of one model: which modules have them. What they do is in `_AroundOperator` and `_AroundRoot`."""

    def __init__(
        self, step: Step, trainability: Trainability, saved_tensors: SavedTensors, gathers: bool, handles: Handles
    ) -> None:
        """gathers: parameters are gathered from other ranks. handles: empty; written by nobody else."""
        self._handles = handles
        # `OperatorHooks` fills this list itself. `PlainCopies` reads it, to leave these hooks out of copies.
        self._operators = OperatorHooks(handles.of_operators)
        self._around_operator = _AroundOperator(step, trainability, saved_tensors, gathers)
        self._around_root = _AroundRoot(step, trainability, saved_tensors, self._operators)
        self._calls: dict[nn.Module, CompiledCall] = {}

    def attach(self, root: nn.Module, operators: list[tuple[nn.Module, Operator]]) -> None:
        """Install the hooks of these operators and of the root, in place of all earlier ones."""
        # Remove the hooks of all operators, also of those that stay: each is bound to an `Operator` of the earlier
        # table, whose chunks and flags may differ.
        self._detach()
        around: list[tuple[nn.Module, Callable[..., None], Callable[..., Any]]] = [
            (module, partial(self._around_operator.before, operator), partial(self._around_operator.after, operator))
            for module, operator in operators
        ]
        # The root comes last: if it is an operator itself, its hooks as root stand around those of the operator.
        around.append((root, self._around_root.before, self._around_root.after))
        for module, before, after in around:
            # Module hooks run inside `module.compile()`, where the compiler would trace them. Wrap the call instead.
            if module._compiled_call_impl is not None:
                # A root that is an operator comes twice: both pairs of hooks stand around its one compiled call.
                if module not in self._calls:
                    self._calls[module] = CompiledCall(module)
                self._calls[module].add(before, after)
            else:
                # The root's hooks lift the operators' hooks while they run themselves, so they stay.
                self._operators.add(module, before, after, may_lift=module is not root)
        # Inside a compiled call the hook would be traced, and there `after` stands around the user's hooks already.
        if root._compiled_call_impl is None:
            self._operators.add_last(root, self._around_root.last)

    def _detach(self) -> None:
        self._operators.remove()
        for call in self._calls.values():
            call.remove()
        self._calls.clear()

    def take_over(self, handles: Iterable[RemovableHandle]) -> None:
        """Remove these hooks too when the time comes."""
        self._handles.add(handles)

    def take_over_casts(self, handles: Iterable[RemovableHandle]) -> None:
        """As `take_over`, of casts between modules of different dtypes, without which no copy could run."""
        self._handles.add_casts(handles)

    def remove(self) -> None:
        """Remove all hooks: the module runs as if it had never been wrapped. Local; raises nothing."""
        self._detach()
        self._handles.remove_others()


class _AroundOperator:
    """What the hooks of every operator do."""

    def __init__(self, step: Step, trainability: Trainability, saved_tensors: SavedTensors, gathers: bool) -> None:
        self._step = step
        self._trainability = trainability
        self._saved_tensors = saved_tensors
        self._gathers = gathers

    def before(self, operator: Operator, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # what is traced has hooks around it
            return
        with unseen():
            # The user has changed `requires_grad` and calls this module outside of the model's forward.
            if self._trainability.flags_raised:
                self._trainability.apply_outside(module)
            call = self._step.enter_operator(module, operator)
        if self._step.calls.depth() == 1:
            _watch(call)
        # From here on the other ranks would wait for this one in a gather: publish a failure to them.
        with self._step.publishing():
            with unseen():
                self._step.fetch_operator(call)
            # A transform of torch.func allows no saved-tensor hooks: its graph would keep weights whose slot is reused.
            check_operator(module, operator.chunks)
            # See [Note: Root hooks]. The call notes them, so that its end pops them also after an exception.
            if self._saved_tensors.needed():
                call.note_hooks(self._saved_tensors.push())

    def after(self, operator: Operator, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        # torch and `CompiledCall` run this hook after an exception, too: without it the call's pins would stay, and its
        # chunks could never leave their slots.
        self._step.exit_operator(operator)
        # Ranks may use different parts of this operator: have backward fetch all of its chunks on every rank.
        if operator.routes and torch.is_grad_enabled() and hooks_are_allowed():
            return reached_by_backward((args, kwargs), output, partial(self._enter_leaf, operator))
        # The backward of a compiled region reads its weights in one node, so all of its chunks must be there before.
        if operator.is_compiled and self._gathers and torch.is_grad_enabled():
            _call_in_backward(partial(self._enter_leaf, operator), output)
        return None

    def _enter_leaf(self, operator: Operator, grad: Tensor) -> None:
        with self._step.publishing(), unseen(), untracked():
            self._step.backward.enter_leaf(operator)


class _AroundRoot:
    """What the root's hooks do."""

    def __init__(
        self, step: Step, trainability: Trainability, saved_tensors: SavedTensors, operators: OperatorHooks
    ) -> None:
        """operators: the hooks that are lifted inside of the root's forward."""
        self._step = step
        self._trainability = trainability
        self._saved_tensors = saved_tensors
        self._operators = operators

    def before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        self._operators.keep_last(module)
        step = self._step
        with unseen():
            call, begins = step.enter_forward(module)
            if step.calls.depth() == 1:
                _watch(call)
            # The outermost call begins a forward. Another plan may come into force here, before anything is fetched.
            # Edits go home before it, since homes may move, and slots are taken after it, in the number that it says.
            if begins:
                with step.publishing():
                    step.begin_forward()
                    self._trainability.before_use()
                    # Without gradients `requires_grad` means nothing: what is frozen for an evaluation moves no memory.
                    if torch.is_grad_enabled():
                        self._trainability.before_training()
                    step.begin_pass()
        # See [Note: Resident models]. A nested call finds the operators' hooks lifted: the outer call puts them back. A
        # recomputed call keeps its hooks, since `in_step` is False in a backward.
        if step.is_resident and step.params.in_step and self._operators.lift():
            call.note_lifted(self._operators)
        # Autocast's cache would serve casts of a payload that has left its slot. The setting is noted before it is
        # changed, so that an interrupt in between still restores it.
        call.note_autocast(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        if self._saved_tensors.needed():
            call.note_hooks(self._saved_tensors.push())

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        error = _error_of_call()
        recomputing = self._step.is_recomputing()
        if not self._step.end_forward():
            return  # it was refused
        # Checkpointing stops a recomputation early with an exception of its own, which is no failure.
        if error is not None and not recomputing:
            self._step.failures.forward_failed(error)
            return
        if torch.is_grad_enabled() and not recomputing and hooks_are_allowed():
            _call_in_backward(self._on_root_output, output)

    def last(self, module: nn.Module, args: Any, output: Any) -> None:
        """Tell the others of a hook of the user's that raised behind `after`, as `PlainView.__call__` does.

        For calls of the wrapped module itself (`model.module(x)`, `model.generate(...)`), which do not come by there.
        """
        if torch.compiler.is_dynamo_compiling():
            return
        error = _error_of_call()
        if not (error is None or isinstance(error, GeminiError) or self._step.is_recomputing()):
            self._step.communicator.publish(error)

    @never_traced(A_HOOK)
    def _on_root_output(self, grad: Tensor) -> None:
        self._step.backward.begin()


def _watch(call: Call) -> None:
    """Notice writes through `.data` until the outermost call of this thread ends."""
    watch = Watch()
    # Noted before it is entered: an interrupt in between would leave it entered.
    call.note_watch(watch)
    watch.__enter__()


def _error_of_call() -> BaseException | None:
    """The exception that ended the call whose after-hook asks; None if the call has returned.

    The output does not tell: a model may return None, and a hook of the user's may raise when there is an output.
    """
    error = sys.exc_info()[1]
    # The call may be inside an `except` block of the user's, whose exception is not that of the call. A traceback
    # begins at the frame that caught the exception: for a call that failed, the one that calls our hook.
    caught = None if error is None else error.__traceback__
    return error if caught is not None and caught.tb_frame is sys._getframe(2) else None


def _call_in_backward(hook: Callable[[Tensor], None], output: Any) -> None:
    """Register `hook` on a module's outputs, so that backward calls it before it enters the module."""
    for tensor in tensors_in(output):
        # A leaf that the module passes on, such as a parameter, outlives the call: a hook on it would stay, and every
        # later backward would call it.
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(hook)
