"""Hooks: where the module tree and autograd call `Step`. All are removable, none patches a class.

[Note: Root hooks] Saved-tensor hooks are pushed at the root's forward, so that functions between operators are
covered, and again in an operator whenever they are not on top (inside a checkpointed region, under save_on_cpu).
The end of backward is queued from the root's *outputs*: their hooks run in the outermost graph task, while a
parameter's gradient may arrive in one that reentrant checkpointing started.

[Note: Resident models] Where every payload is at home on this rank for good, no operator has hooks inside the root's
forward, and autograd keeps what it saves as it does in plain PyTorch: its own version counters tell graphs from before
an update. Parameters become plain at the root, all at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.access.saved_tensors import SavedTensors, check_operator, hooks_are_allowed
from gemini.access.trainability import Trainability
from gemini.manager.calls import Operator
from gemini.manager.operator_hooks import OperatorHooks
from gemini.manager.step import Step
from gemini.memory.modes import unseen, untracked
from gemini.model.compiled import CompiledCall
from gemini.model.leaf import reached_by_backward
from gemini.model.tensors import tensors_in


class Hooks:
    """The hooks of one model."""

    def __init__(self, step: Step, trainability: Trainability, saved_tensors: SavedTensors, gathers: bool) -> None:
        """gathers: parameters are gathered from other ranks."""
        self._step = step
        self._trainability = trainability
        self._gathers = gathers
        self._saved_tensors = saved_tensors
        self._handles: list[RemovableHandle] = []
        self._operators = OperatorHooks()
        self._calls: dict[nn.Module, CompiledCall] = {}

    def attach(self, root: nn.Module, operators: list[tuple[nn.Module, Operator]]) -> None:
        """Have the hooks of these operators and of the root, and of no others."""
        self._detach()
        around: list[tuple[nn.Module, Callable[..., None], Callable[..., Any]]] = [
            (module, partial(self._before_operator, operator), partial(self._after_operator, operator))
            for module, operator in operators
        ]
        around.append((root, self._before_root, self._after_root))
        for module, before, after in around:
            if module._compiled_call_impl is not None:  # the compiler would trace hooks of the module
                if module not in self._calls:
                    self._calls[module] = CompiledCall(module)
                self._calls[module].add(before, after)
            else:  # the root's own hooks are running when the others are lifted
                self._operators.add(module, before, after, may_lift=module is not root)

    def _detach(self) -> None:
        self._operators.remove()
        for call in self._calls.values():
            call.remove()
        self._calls.clear()

    def take_over(self, handles: Iterable[RemovableHandle]) -> None:
        """Remove these hooks too when the time comes."""
        self._handles += handles  # one by one: where registering fails, those before can be removed

    @property
    def handles(self) -> tuple[RemovableHandle, ...]:
        """Of all hooks that the model's modules and parameters have because of us."""
        return (*self._handles, *self._operators.handles)

    def remove(self) -> None:
        """The module is called as if it had never been wrapped. Local; raises nothing."""
        self._detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- operators

    def _before_operator(self, operator: Operator, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # what is traced has hooks around it
            return
        with unseen():
            if self._trainability.flags_raised:
                self._trainability.apply_outside(module)
            call = self._step.enter_operator(module, operator)
        with self._step.publishing():
            with unseen():
                self._step.fetch_operator(call)
            check_operator(module, operator.chunks)
            if self._saved_tensors.needed():
                call.hooks = self._saved_tensors.push()

    def _after_operator(self, operator: Operator, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        self._step.exit_operator(operator)
        if operator.routes and torch.is_grad_enabled() and hooks_are_allowed():
            return reached_by_backward((args, kwargs), output, partial(self._enter_leaf, operator))
        if operator.is_compiled and self._gathers and torch.is_grad_enabled():
            _call_in_backward(partial(self._enter_leaf, operator), output)
        return None

    def _enter_leaf(self, operator: Operator, grad: Tensor) -> None:
        with self._step.publishing(), unseen(), untracked():
            self._step.backward.enter_leaf(operator)

    # -- the root

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        step = self._step
        with unseen():
            call, begins = step.enter_forward(module)
            if begins:
                with step.publishing():
                    step.begin_forward()
                    self._trainability.before_use()
                    if torch.is_grad_enabled():
                        self._trainability.before_training()
                    step.begin_pass()
        if step.is_resident and step.params.in_step and self._operators.lift():
            call.lifted = self._operators
        call.caches_autocast = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # it would serve the weights of a payload that left its slot
        call.hooks = self._saved_tensors.push() if self._saved_tensors.needed() else None

    def _after_root(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        error = sys.exc_info()[1] if output is None else None
        recomputing = self._step.is_recomputing()
        if not self._step.end_forward():
            return  # it was refused
        if error is not None and not recomputing:  # a recomputation may be stopped early by an exception of torch's own
            self._step.failures.forward_failed(error)
            return
        if torch.is_grad_enabled() and not recomputing and hooks_are_allowed():
            _call_in_backward(self._on_root_output, output)

    def _on_root_output(self, grad: Tensor) -> None:
        self._step.backward.begin()


def _call_in_backward(hook: Callable[[Tensor], None], output: Any) -> None:
    """Have backward call `hook` when it comes to what a module returned."""
    for tensor in tensors_in(output):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(hook)
