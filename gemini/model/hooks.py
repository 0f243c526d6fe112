"""Hooks around the root and its operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.access.full_access import Watch
from gemini.access.saved_tensors import SavedTensors, check_operator, hooks_are_allowed
from gemini.errors import GeminiError, UnsupportedError
from gemini.memory.modes import A_HOOK, never_traced, unseen, untracked
from gemini.model.operators import (
    CompiledCall,
    Found,
    OuterCompiler,
    find_operators,
    is_compiled,
    map_tensors,
    tensors_in,
)
from gemini.placement.next_use import Phase
from gemini.replan.trainability import Trainability
from gemini.runtime.calls import Call, Operator, OperatorHooks
from gemini.runtime.manager import ChunkManager
from gemini.runtime.step import Step

# -- Leaves whose parts are used by some ranks only: backward must pass through them on every rank, in the same order.
#
# [Note: Leaves] Backward enters a leaf when the gradient of one of its outputs is ready. Then all of its chunks are
# fetched, and they stay until backward needs another chunk. Inside the leaf autograd runs its nodes in any order,
# without a collective. On a rank that used nothing of the leaf autograd would bypass it, and the modules that made its
# inputs. So -0.0, made from all inputs, is added to every output. It changes no bit, and its backward gives the inputs
# no gradient but makes autograd visit the nodes behind them.


class _MinusZero(torch.autograd.Function):
    """A scalar -0.0 that depends on `inputs`."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.num_inputs = len(inputs)
        # Not 0.0, which would turn an output of -0.0 into 0.0.
        return torch.full((), -0.0, dtype=like.dtype, device=like.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * (1 + ctx.num_inputs)


def reached_by_backward(inputs: Any, output: Any, enter: Callable[[Tensor], None]) -> Any:
    """Make `output` depend on all `inputs`, and call `enter` when backward reaches it. See [Note: Leaves]."""
    linked = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]

    def reached(value: Tensor) -> Tensor:
        # Backward never reaches an integer output, such as the numbers of the chosen experts.
        if not (value.is_floating_point() or value.is_complex()):
            return value
        # The anchor gives the output a graph even if no input requires a gradient.
        anchor = torch.empty((), dtype=value.dtype, device=value.device, requires_grad=True)
        value = value + _MinusZero.apply(anchor, *linked)
        # On every output: which gradient is ready first depends on the rest of the graph. `enter` does nothing in a
        # leaf that backward is in.
        value.register_hook(enter)
        return value

    return map_tensors(reached, output)


# -- Hooks: the places where the module tree and autograd call `Step`. All are removable, none patches a class.
#
# [Note: Root hooks] Saved-tensor hooks are pushed at the root's forward, so that functions between operators are
# covered, and again in an operator whenever they are not on top (inside a checkpointed region, under save_on_cpu).
# The end of backward is queued from hooks on the root's *outputs*, because these run in the outermost graph task. A
# parameter's gradient may arrive in an inner task that reentrant checkpointing started.
#
# [Note: Resident models] If every payload is at home on this rank for good, operators have no hooks inside the root's
# forward, and autograd saves tensors as in plain PyTorch: its version counters detect graphs from before an update. The
# root makes all parameters plain at once.


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
        self._failures = step.failures
        self._trainability = trainability
        self._saved_tensors = saved_tensors
        self._gathers = gathers

    def before(self, operator: Operator, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # what is traced has hooks around it
            return
        with unseen():
            # The user has changed `requires_grad` and calls this module outside of the model's forward.
            if self._trainability.flags_raised:
                self._trainability.apply_outside()
            call = self._step.enter_operator(operator)
        if call.is_outermost:
            _watch(call)
        # From here on the other ranks would wait for this one in a gather: publish a failure to them.
        builds_graph = torch.is_grad_enabled()
        try:
            with unseen(), untracked():
                self._step.fetch_operator(call)
            # A transform of torch.func allows no saved-tensor hooks: its graph would keep weights whose slot is reused.
            check_operator(module, operator.chunks)
            # See [Note: Root hooks]. The call notes them, so that its end pops them also after an exception.
            if self._saved_tensors.needed():
                call.note_hooks(self._saved_tensors.push())
        except BaseException as error:
            self._failures.publish(error, builds_graph)
            raise

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
        with self._failures.publishing(), unseen(), untracked():
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
            call, begins = step.enter_forward()
            if call.is_outermost:
                _watch(call)
            # The outermost call begins a forward. Another plan may come into force here, before anything is fetched.
            # Edits go home before it, since homes may move, and slots are taken after it, in the number that it says.
            if begins:
                with step.failures.publishing():
                    step.begin_forward()
                    self._trainability.before_use()
                    # Without gradients `requires_grad` means nothing: what is frozen for an evaluation moves no memory.
                    if torch.is_grad_enabled():
                        self._trainability.before_training()
                    step.begin_pass()
        # See [Note: Resident models]. A nested call finds the operators' hooks lifted: the outer call puts them back. A
        # recomputed call keeps its hooks, since `in_step` is False in a backward.
        if step.payloads.is_resident and step.params.in_step and self._operators.lift():
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
        """Tell the others of a hook of the user's that raised behind `after`, as `ShardedModel.__call__` does.

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


# -- The operator table: a model's operators with their hooks, updated when modules are compiled.
#
# A module may be compiled after it was wrapped, or stop being compiled. The table checks for that before every forward.
# If it has happened, it finds the operators again and replaces the plan: a compiled module needs all of its chunks at
# once.


class OperatorTable:
    """The operators of one model on this rank."""

    def __init__(
        self,
        root: nn.Module,
        found: Found,
        manager: ChunkManager,
        trainability: Trainability,
        hooks: Hooks,
        ignored: Collection[nn.Parameter],
    ) -> None:
        """found: the operators that the plan was made for. ignored: parameters outside of all operators."""
        self._ignored = ignored
        self._manager = manager
        self._step = manager.step
        self._trainability = trainability
        self._hooks = hooks
        self.compiler = OuterCompiler()
        # Numbers in the table of positions, which only grows: a module keeps its number while it is no operator.
        self._numbers = {module: place + 1 for place, (module, _) in enumerate(found)}
        self.operators: list[Operator] = []
        self._attach(root, found)

    def follow_compilation(self, root: nn.Module) -> None:
        """Update the operators if the set of compiled modules has changed. Collective then.

        Raises GeminiError between the micro-batches of a step, BudgetError if a compiled module's chunks do not fit
        together, DivergenceError if ranks differ; nothing has changed then.
        """
        step = self._step
        # An exception may have ended calls without our hooks. Find those, or they would count as running.
        if step.calls.by_thread:
            step.failures.find()
        # A nested call of the model, or a recomputation in backward, must see the operators that it began with.
        if step.calls.by_thread or step.is_recomputing():
            return
        # The user has called `torch.compile(model)`, or a compiled function that calls the model.
        if self.compiler.is_on and not is_compiled(root):
            self.compiler.compile(root)
            try:
                self._change(root)
            except BaseException:
                # The plan was refused, so the next call must not find the module compiled.
                root._compiled_call_impl = None
                raise
        # The user may have given the model another root, as with `model.module = torch.compile(model.module)`.
        elif root is not self._root or self._looks() != self._looked:
            # The fingerprint also changes with any new attribute or child. Only other compiled modules need another
            # plan.
            if root is not self._root or _compiled_modules(root.modules()) != self._compiled:
                self._change(root)
            else:
                self._look_at(root)

    def _change(self, root: nn.Module) -> None:
        """Find the operators again and replace the plan. Collective."""
        step, plan = self._step, self._manager.plan
        step.check_idle("compiling a module")
        # `check_idle` has set the position to a use of a parameter. Errors below name the forward that follows.
        step.position.set(0, Phase.FORWARD)
        by_name = {weight.name: place for place, weight in enumerate(plan.spec.weights)}
        managed = [each for chunk in step.chunks for each in chunk.parameters]
        # The plan's spec, and what follows from it, know weights by their places, so these stay.
        places = {each.parameter: by_name[each.name] for each in managed}
        found = find_operators(root, plan.settings.gathers(plan.world_size), places, self._ignored)
        # Places beyond the known weights were given to parameters that are in no chunk.
        for _, spec in found:
            if any(place >= len(by_name) for place in spec.weights):
                raise UnsupportedError(
                    f"{spec.name or 'the model'} was compiled or replaced and has parameters that were not in the "
                    "model when it was wrapped: change the module before ShardedModel(...)"
                )
        with step.publishing(), torch.inference_mode(False), torch.no_grad():
            # Ranks compare these words: all must have compiled the same modules.
            names = [spec.name or "the model" for _, spec in found if spec.is_compiled]
            shown = f"compiled: {', '.join(names) or 'nothing'}"
            self._trainability.change_operators(shown, tuple(spec for _, spec in found))
        self._attach(root, found)

    def _attach(self, root: nn.Module, found: Found) -> None:
        """Install hooks on the present operators, and remove all others."""
        # The plan in force was made for these operators, in this order.
        hooked = []
        for (module, spec), indices in zip(found, self._manager.plan.use_order, strict=True):
            if module not in self._numbers:
                self._numbers[module] = self._step.position.add(spec.name)
            chunks = tuple(self._step.chunks[index] for index in indices)
            operator = Operator(self._numbers[module], spec.name, chunks, spec.routes, spec.is_compiled)
            hooked.append((module, operator))
        self.operators = [operator for _, operator in hooked]
        self._hooks.attach(root, hooked)
        self._look_at(root)

    # -- the fingerprint

    def _look_at(self, root: nn.Module) -> None:
        """Record the module tree and its fingerprint."""
        self._root = root
        modules = list(root.modules())
        self._attributes = [module.__dict__ for module in modules]
        self._children = [module._modules for module in modules if module._modules]
        self._childless = [module._modules for module in modules if not module._modules]
        self._compiled = _compiled_modules(modules)
        # A module that gets one of these attributes later has more attributes, which the fingerprint counts.
        self._marked = [each for each in self._attributes if "_compiled_call_impl" in each or "forward" in each]
        self._looked = self._looks()

    def _looks(self) -> tuple[list[int], list[Any], list[Any], bool]:
        """A cheap fingerprint of the module tree, which changes when a module is compiled.

        `module.compile()` and `module.forward = ...` add or replace an attribute, and `torch.compile(child)` replaces
        or adds a child. The fingerprint has the number of attributes of each module, the children, these two
        attributes, and whether a module that had no child has one.
        """
        # This runs before every forward, so few modules are looked at one by one: `map` goes over kept lists of dicts,
        # and `any` finds an empty dict that was filled.
        children = list(chain.from_iterable(map(dict.values, self._children)))
        marks = [(each.get("_compiled_call_impl"), each.get("forward")) for each in self._marked]
        return list(map(len, self._attributes)), children, marks, any(self._childless)


def _compiled_modules(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """Those that are compiled, with their compiled calls, which may be replaced."""
    return [(module, module._compiled_call_impl) for module in modules if is_compiled(module)]
