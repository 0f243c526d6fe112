"""What a micro-batch does with a model's weights, found by running the plain module: no chunk, no slot, no rank.

Saved-tensor hooks say which weight a node of the backward reads, hooks of the weights when a gradient is there, and
hooks of modules which operator runs, in a recomputation too.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gemini.placement.demand import ModelSpec
from gemini.placement.next_use import Act, Moment, PassSchedule


class _Recorder:
    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        self.moments: list[Moment] = []
        self._parameters = dict(module.named_parameters())
        self.weights = {
            self._parameters[weight.name].untyped_storage()._cdata: place for place, weight in enumerate(spec.weights)
        }
        self._tasks: list[int] = []  # that run now, outermost first
        self._nodes: list[Any] = []  # all that were seen, so that none has the identity of another
        self._hooks: list[Any] = []
        self.operator = 0  # the last one that was entered
        self.recomputed: weakref.ref[_Foreign] | None = None  # the last activation that checkpointing packed
        modules = dict(module.named_modules())
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._before_root, prepend=True),
            module.register_forward_hook(self._after_root, always_call=True),
        ]
        for place, operator in enumerate(spec.operators):
            self._watch(modules[operator.name], place)
        for place, weight in enumerate(spec.weights):
            if weight.trainable:
                self._watch_gradient(self._parameters[weight.name], place)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: nn.Module, place: int) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self.operator = place
            self._note(Act.ENTER, place)
            self._push()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._hooks.pop().__exit__(None, None, None)
            self._note(Act.LEAVE, place)

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _watch_gradient(self, parameter: nn.Parameter, place: int) -> None:
        def note(parameter: Tensor) -> None:
            self._note(Act.GRADIENT, place)

        self._handles.append(parameter.register_post_accumulate_grad_hook(note))

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if self.moments and torch._C._current_graph_task_id() == -1:
            self._note(Act.BEGIN, 0)
        self._push()

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hooks.pop().__exit__(None, None, None)

    def _push(self) -> None:
        below = torch._C._autograd._top_saved_tensors_default_hooks(True)
        while below is not None and isinstance(below[0], _Pack):
            below = below[0].below
        hooks = torch.autograd.graph.saved_tensors_hooks(_Pack(self, below), self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Foreign):
            return packed.unpack()
        read, tensor, after = packed
        if read is not None:
            activation = None if after is None else after()
            if activation is not None:  # of the same recomputation, which comes first
                activation.unpack_early()
            self._note(Act.READ, *read)
        return tensor

    def _note(self, act: Act, place: int, operator: int = -1) -> None:
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        if task == -1:
            self.moments.append(Moment(act, place))
            return
        while self._tasks and self._tasks[-1] > task:
            self._tasks.pop()
        if task not in self._tasks:
            self._tasks.append(task)
        if not any(node is seen for seen in self._nodes):
            self._nodes.append(node)
        number = next(number for number, seen in enumerate(self._nodes) if seen is node)
        self.moments.append(Moment(act, place, self._tasks.index(task), number, operator))


class _Pack:
    def __init__(self, recorder: _Recorder, below: Any) -> None:
        self.recorder, self.below = recorder, below

    def __call__(self, tensor: Tensor) -> Any:
        recorder, below = self.recorder, self.below
        place = recorder.weights.get(tensor.untyped_storage()._cdata)
        if place is not None:
            if below is not None:
                below[0](tensor.detach())  # checkpointing counts what it is shown
            last = None if recorder.recomputed is None else recorder.recomputed()
            is_of_it = last is not None and below is not None and last.hook is below[1]
            return (place, recorder.operator), tensor, recorder.recomputed if is_of_it else None
        if below is None:
            return None, tensor.detach(), None
        foreign = _Foreign(below[0](tensor), below[1])
        recorder.recomputed = weakref.ref(foreign)
        return foreign


class _Foreign:
    """What checkpointing packed. It gives each tensor once in a backward."""

    def __init__(self, packed: Any, hook: Callable[[Any], Tensor]) -> None:
        self.hook = hook
        self._packed = packed
        self._early: list[Tensor] = []
        self._is_given = False

    def unpack(self) -> Tensor:
        self._is_given = True
        return self._early.pop() if self._early else self.hook(self._packed)

    def unpack_early(self) -> None:
        if not self._is_given:
            self._is_given = True
            self._early.append(self.hook(self._packed))


def dry_run(module: nn.Module, spec: ModelSpec, loss_of: Callable[[nn.Module], Tensor]) -> PassSchedule:
    """The schedule of one micro-batch. `spec` is the plan's; `module` is plain, and has no gradients afterwards."""
    recorder = _Recorder(module, spec)
    loss = loss_of(module)
    forward, recorder.moments = tuple(recorder.moments), []
    loss.backward()
    recorder.remove()
    module.zero_grad()
    return PassSchedule(forward, tuple(recorder.moments))
