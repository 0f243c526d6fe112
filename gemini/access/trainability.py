"""Freezing and unfreezing while a model is trained: `requires_grad` of wrapped parameters may change at any time.

The flag is the parameter's own, so what it means for a graph is what it means in plain PyTorch. Memory follows at a
boundary: the first forward with gradients after a step, or after zero_grad(). There a chunk whose last trainable
parameter was frozen gives its gradient memory back, one that got its first takes gradient, master and optimizer memory,
and placement is decided again. Nothing is packed again: memory is by chunk.

[Note: Frozen state] As in plain PyTorch, a frozen parameter keeps its moments, its step count and its fp32 master, so
that models which are trained in turns (the generator and the critic of a GAN) train as they do there. No step reads
this state, so the policies put it on the host where the device is short of memory. What can be derived is not kept:
moments that no step has touched are zeros, and a master that was never given anything but 16-bit values equals its
weights. `ShardedOptimizer.discard_state()` gives the rest up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from gemini.access.free_memory import FreeMemory
from gemini.access.live_plan import BUDGETED, LivePlan
from gemini.access.purpose import Purpose
from gemini.access.replanning import BEFORE_STEP, Replanning, refused_after
from gemini.chunks.chunk import ManagedParameter
from gemini.manager.chunk_manager import ChunkManager
from gemini.manager.masters import master_from_weights
from gemini.memory.collector import uncollected
from gemini.placement.budget import Budget, FreeBytes
from gemini.placement.demand import Kind
from gemini.placement.offloaded import offloaded
from gemini.placement.plan import PlanChanges
from gemini.placement.specs import OperatorSpec
from gemini.settings import BUDGETS, Settings

_requires_grad: Callable[[Tensor], bool] = cast(Any, Tensor).requires_grad.__get__
_TRAINED = "change of what is trained", "All ranks must freeze and unfreeze the same parameters at the same step"
_COMPILED = "change of what is compiled", "All ranks must compile the same modules before the same forward"
_OFFLOADED = "change of what is offloaded", "All ranks must offload and reload the same states at the same step"
_MARGIN = "gpu_margin_mem_ratio", "All ranks must give their optimizers the same one"


class Trainability:
    """Which parameters of a model are trained, and what follows from a change."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._step = manager.step
        self._managed = [each for chunk in manager.chunks for each in chunk.parameters]
        self._parameters = [each.parameter for each in self._managed]
        self._flags = [each.requires_grad for each in self._managed]
        self.unfrozen: set[int] = set()  # indices of parameters that were frozen when the model was wrapped, or later
        self._free = FreeMemory(manager)
        self._replanning = Replanning(manager)
        self._live = LivePlan(manager, self._replanning, self._free)
        self.purpose = Purpose(manager, self._replanning, self._free)
        self.flags_raised: set[int] = set()  # parameters whose flags were raised since memory followed, unless plain

    def apply_flags(self) -> None:
        """Bring memory in line with the flags, if one has changed. Collective then.

        Raises GeminiError between the micro-batches of a step, BudgetError if there is no room, and DivergenceError
        if ranks differ; nothing has changed then.
        """
        with torch._C.DisableTorchFunctionSubclass():
            flags = list(map(_requires_grad, self._parameters))
        if flags != self._flags:
            with self._step.publishing(), torch.inference_mode(False), torch.no_grad():
                self._change(flags)
        self.flags_raised.clear()

    def asks_for_bound(self) -> bool:
        """The next forward with gradients wants to know what its batch takes. Local, and equal on all ranks."""
        return self._free.asks_for_bound(self._manager.plan)

    def note_bound(self, most_activations: int | None) -> None:
        """What the forward that is about to run takes at most besides model data. None: nobody knows. Local."""
        self._free.most_activations = most_activations

    def before_training(self) -> None:
        """A forward with gradients begins: `apply_flags`, and make room for its activations. Collective then."""
        self.apply_flags()
        if self.asks_for_bound():
            self._live.make_room()

    def apply_unfrozen(self) -> None:
        """`apply_flags` if something was unfrozen, which a graph that is about to be built needs memory for.

        What was only frozen keeps its gradient memory until the next forward: it may be trained again by then. Only
        flags that were raised since are looked at, as this may follow each of them.
        """
        raised = self.flags_raised
        with torch._C.DisableTorchFunctionSubclass():
            is_unfrozen = any(_requires_grad(self._parameters[index]) and not self._flags[index] for index in raised)
        if is_unfrozen:
            self.apply_flags()
        raised.clear()
        self._note_graphs()

    def apply_outside(self, module: nn.Module | None = None) -> None:
        """A flag was raised: `apply_unfrozen` if a graph is about to be built outside the model's forward.

        module: whose call is about to begin. Collective if something was unfrozen.
        """
        step = self._step
        if not torch.is_grad_enabled() or (step.params.in_step and step.calls.depth()):
            return
        with step.publishing():
            step.failures.find(module)
            if step.calls.by_thread or step.is_recomputing():
                return
            step.failures.recover()
            if not step.grads.in_backward:
                self.before_graph()
                self.apply_unfrozen()

    def take_state(self, wanted: Mapping[int, frozenset[Kind]]) -> None:
        """Memory for the state of frozen chunks, by chunk index, into which a state dict is loaded. Collective.

        Raises GeminiError if gradients wait for a step, BudgetError if there is no room; nothing has changed then.
        """
        if wanted:
            self._check_between_steps("loading the state of frozen parameters", BEFORE_STEP)
            names = ", ".join(self._step.chunks[index].names() for index in sorted(wanted))
            self._replan(self._flags, f"state loaded for frozen {names}", wanted=wanted)

    def discard_state(self, discarded: Sequence[ManagedParameter]) -> None:
        """Give up master, moments and step counts of frozen parameters, and the memory of chunks that keep none.

        Collective. Raises GeminiError if gradients wait for a step, and DivergenceError if ranks name other ones;
        nothing has changed then.
        """
        self._check_between_steps("discard_state()", BEFORE_STEP)
        step, optimizer = self._step, self._manager.optimizer
        shown = f"state given up: {', '.join(each.name for each in discarded)}"
        step.communicator.agree(shown.encode(), "discard_state()", remedy="All ranks must give up the same state")
        step.binding.write_back_all()
        for each in discarded:
            if Kind.MASTER in each.chunk.homes:
                master_from_weights(each.chunk, each)
            each.has_fractions = False
            if optimizer is not None:
                optimizer.states.discard(each)
        self._replan(self._flags, shown)

    def offload(self, kinds: Collection[Kind]) -> None:
        """States of these kinds leave the device, until `reload`, or the next use of the model. Collective.

        Raises GeminiError if gradients wait for a step or parameters are in use, BudgetError if the host has no room,
        and DivergenceError if ranks offload other states; nothing has changed then.
        """
        with self._replanning.between_steps("offload_states()"):
            plan, shown = offloaded(self._manager.plan, kinds), f"offloaded: {', '.join(sorted(kinds))}"
            self._manager.change_plan(plan, shown, *_OFFLOADED)
            self._manager.give_room()

    def reload(self) -> None:
        """What was offloaded is where the policy wants it again. Collective, if something was. Raises as `offload`."""
        if self._manager.plan.offloaded:
            with self._replanning.between_steps("reload_states()"):
                self._replan(self._flags, "states reloaded", _OFFLOADED)

    def before_use(self) -> None:
        """The model is about to be used: `reload`, if nothing is in its way; follow free memory, and what the use is.

        Collective then. With states that cannot come back now it works where they are.
        """
        if self._manager.plan.offloaded and not (self._replanning.gradients_wait or self._manager.is_in_use):
            self.reload()
        if self._live.follow():
            self._note_graphs()
        self._follow_use(torch.is_grad_enabled())

    def change_budgets(self, settings: Settings, free: FreeBytes, named: Collection[str]) -> None:
        """Homes and slots follow the budgets of `settings`, and `free` where those name none. Collective.

        named: the budgets that change; what the others leave to model data stays.
        Raises as `offload` does; BudgetError also where the device has no room.
        """
        words = [f"{name}={settings.budget_bytes(name)}" for name in BUDGETS]
        before = self._manager.plan
        budget = Budget.of(settings, replace(free, activations=self._free.activations))
        names_device = named != {"host_memory"}
        budget = Budget(
            budget.device if names_device else before.budget.device,
            # what was free at wrapping may be too little for states that leave the device now
            budget.host if "host_memory" in named else before.budget.wider(budget).host,
        )
        with self._replanning.between_steps("change_budgets()"):
            self._replan(self._flags, f"budgets: {', '.join(words)}", BUDGETED, settings=settings, budget=budget)
        if names_device:
            self._free.forget()

    def change_margin(self, ratio: float) -> None:
        """What masters and optimizer state may take of the device, as `Settings.gpu_margin_mem_ratio`. Collective.

        Raises as `change_budgets`, and ValueError where the policy does not ask for it.
        """
        settings = replace(self._manager.plan.settings, gpu_margin_mem_ratio=ratio)
        if settings != self._manager.plan.settings:
            with self._replanning.between_steps("gpu_margin_mem_ratio="):
                self._replan(self._flags, f"gpu_margin_mem_ratio={ratio}", _MARGIN, settings=settings)

    def change_operators(self, shown: str, operators: tuple[OperatorSpec, ...]) -> None:
        """Operators have changed, and what is trained has not: another plan is put in force. Collective.

        Raises what `apply_flags` raises.
        """
        step = self._step
        self._check_between_steps(shown)
        self._replan(self._flags, shown, _COMPILED, operators=operators)
        step.grads.reset_order()
        step.params.next_use.forget()

    def before_graph(self) -> None:
        """A graph is about to be built, or a gradient to be set: the plan is to be that for training. Collective then.

        With states that cannot move now it stays. Raises nothing where training does not fit: backward does.
        """
        self._follow_use(True)

    def _follow_use(self, builds_graph: bool) -> None:
        purpose = self.purpose
        if purpose.is_followed(builds_graph) or not self._replanning.is_possible:
            return
        with self._replanning.between_steps("a first use"):
            if builds_graph:
                purpose.begin_graph()
                self.flags_raised.clear()
            else:
                purpose.infer()
                self._note_graphs()

    def _note_graphs(self) -> None:
        """Graphs of all trained parameters are looked out for, as memory does not follow their flags yet."""
        if self._manager.plan.infers and self._manager.training.refused is None:
            self.flags_raised.update(number for number, flag in enumerate(self._flags) if flag)

    def _check_between_steps(self, what: str, when: str = "between the micro-batches of a step") -> None:
        """Raises GeminiError where another plan could not be carried out now."""
        self._replanning.refuse_inside(what, when)
        self._step.grads.forget()  # backwards that were about inputs only

    def _change(self, flags: list[bool]) -> None:
        """Changes nothing if it has to wait for the step."""
        pairs = list(zip(self._managed, flags, strict=True))
        frozen = [each for each, flag in pairs if each.requires_grad and not flag]
        unfrozen = [each for each, flag in pairs if flag and not each.requires_grad]
        if self._replanning.gradients_wait and not unfrozen:
            return
        names = [", ".join(each.name for each in some) or "none" for some in (frozen, unfrozen)]
        self._check_between_steps(f"{names[1]} were unfrozen" if unfrozen else f"{names[0]} were frozen")
        self._replan(flags, f"frozen: {names[0]}; unfrozen: {names[1]}")
        for each in frozen + unfrozen:
            each.requires_grad = not each.requires_grad
        self._step.grads.reset_order()
        self.unfrozen.difference_update(each.index for each in frozen)
        self.unfrozen.update(each.index for each in unfrozen)
        self._flags = flags

    @uncollected()
    def _replan(
        self,
        flags: list[bool],
        shown: str,
        change: tuple[str, str] = _TRAINED,
        wanted: Mapping[int, frozenset[Kind]] | None = None,
        **changes: Unpack[PlanChanges],
    ) -> None:
        """Decide on another plan and put it in force."""
        with refused_after(shown):
            self._manager.change_plan(self._replanning.planned(flags, wanted, **changes), shown, *change)
        self._note_graphs()
