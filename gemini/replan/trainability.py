"""Freezing and unfreezing while a model is trained: `requires_grad` of wrapped parameters may change at any time.

The flag is the parameter's own, so for a graph it means what it means in plain PyTorch. Memory follows at a boundary:
the first forward with gradients after a step, or after zero_grad(). There a chunk whose last trainable parameter was
frozen gives its gradient memory back, a chunk that got its first one takes gradient, master and optimizer memory, and
placement is decided again. Nothing is packed again: memory is by chunk.

[Note: Frozen state] As in plain PyTorch, a frozen parameter keeps its moments, its step count and its fp32 master, so
that models which are trained in turns (the generator and the critic of a GAN) train as they do there. No step reads
this state, so the policies put it on the host if the device is short of memory. State that can be derived is not kept:
moments that no step has touched are zeros, and a master that was never given anything but 16-bit values equals its
weights. `ShardedOptimizer.discard_state()` gives the rest up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from gemini.memory.disk import DiskTier
from gemini.memory.modes import uncollected
from gemini.placement.budget import Budget, FreeBytes
from gemini.placement.demand import Kind, OperatorSpec
from gemini.placement.planning import PlanChanges, has_room_for, offloaded, states_in_words
from gemini.replan.live_plan import (
    BEFORE_STEP,
    BUDGETED,
    OPTIM_CHANGED,
    FreeMemory,
    LivePlan,
    Replanning,
    refused_after,
)
from gemini.replan.purpose import Purpose
from gemini.runtime.binding import master_from_weights
from gemini.runtime.chunk import ManagedParameter
from gemini.runtime.manager import ChunkManager
from gemini.settings import BUDGETS, Settings

_requires_grad: Callable[[Tensor], bool] = cast(Any, Tensor).requires_grad.__get__
_TRAINED = "change of what is trained", "All ranks must freeze and unfreeze the same parameters at the same step"
_COMPILED = "change of what is compiled", "All ranks must compile the same modules before the same forward"
_OFFLOADED = "change of what is offloaded", "All ranks must offload and reload the same states at the same step"
_BROUGHT = "settings that the optimizer brings", "All ranks must give their optimizers the same ones"


class Trainability:
    """Which parameters of a model are trained, and what follows from a change."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._step = manager.step
        self._managed = manager.parameters
        self._parameters = [each.parameter for each in self._managed]
        self._flags = [each.requires_grad for each in self._managed]
        self.unfrozen: set[int] = set()  # trained ones, by index, that were frozen at wrapping or later
        self._free = FreeMemory(manager)
        self._replanning = Replanning(manager)
        self._live = LivePlan(manager, self._replanning, self._free)
        self.purpose = Purpose(manager, self._replanning, self._free)
        self.flags_raised: set[int] = set()  # by index, unless plain: unfrozen since memory followed

    def note_raised(self, managed: ManagedParameter) -> None:
        """The parameter, which is not plain, was unfrozen: its memory follows at the next forward. Local."""
        self.flags_raised.add(managed.index)

    def apply_flags(self) -> None:
        """Bring memory in line with the flags, if one has changed. Collective then.

        Raises GeminiError between the micro-batches of a step, BudgetError if there is no room, and DivergenceError if
        ranks differ; nothing has changed then.
        """
        # The getter is called past `__torch_function__`, because this loop runs over all parameters in every forward.
        with torch._C.DisableTorchFunctionSubclass():
            flags = list(map(_requires_grad, self._parameters))
        if flags != self._flags:
            with self._step.publishing(), torch.inference_mode(False), torch.no_grad():
                self._change(flags)
        self.flags_raised.clear()

    def asks_for_bound(self) -> bool:
        """The next forward with gradients needs a bound of what its batch takes. Local, and equal on all ranks."""
        return self._free.asks_for_bound(self._manager.plan)

    def note_bound(self, most_activations: int | None) -> None:
        """The coming forward takes at most `most_activations` bytes besides model data. None: unknown. Local."""
        self._free.note_bound(most_activations)

    def before_training(self) -> None:
        """A forward with gradients begins: apply the flags, and make room for its activations. Collective then."""
        self.apply_flags()
        if self.asks_for_bound():
            self._live.make_room()

    def apply_unfrozen(self) -> None:
        """Call `apply_flags` if a parameter was unfrozen: a graph that is about to be built needs its gradient memory.

        What was only frozen keeps its gradient memory until the next forward: it may be trained again by then. Only
        flags that were raised since the last call are read, as this may be called after each of them.
        """
        raised = self.flags_raised
        with torch._C.DisableTorchFunctionSubclass():
            is_unfrozen = any(_requires_grad(self._parameters[index]) and not self._flags[index] for index in raised)
        if is_unfrozen:
            self.apply_flags()
        raised.clear()
        self._note_graphs()

    def apply_outside(self) -> None:
        """A flag was raised: call `apply_unfrozen` if a graph is about to be built outside the model's forward.

        Collective if something was unfrozen.
        """
        step = self._step
        # Inside the model's forward memory has followed the flags already.
        if not torch.is_grad_enabled() or (step.params.in_step and step.calls.depth()):
            return
        with step.publishing():
            # A forward that failed unseen still counts as a running call, so it is found before calls are counted.
            step.failures.find()
            if step.calls.by_thread or step.is_recomputing():
                return
            step.failures.recover()
            # `find` has dropped a backward that is over. One in another thread needs its memory where it is.
            if not step.grads.in_backward:
                # The plan for training comes first: one for inference has no gradient memory for what was unfrozen.
                self.before_graph()
                self.apply_unfrozen()

    def follow_optimizer(self, shown: str) -> None:
        """Make the plan count the states that the optimizer needs by now. Collective if it counts others.

        If nothing may move now, a later forward does it. Raises BudgetError if there is no room; nothing has changed
        then.
        """
        manager, optimizer = self._manager, self._manager.optimizer
        if optimizer is not None and self._replanning.is_possible:
            numbers = optimizer.states.state_counts(manager.chunks)
            if not has_room_for(manager.plan, numbers):
                self._replan(self._flags, f"{shown}; {states_in_words(numbers)}", OPTIM_CHANGED)

    def take_state(self, wanted: Mapping[int, frozenset[Kind]]) -> None:
        """Take memory for state of frozen chunks, by index, before a state dict is loaded into it. Collective.

        Raises GeminiError if gradients wait for a step, BudgetError if there is no room; nothing has changed then.
        """
        if wanted:
            self._check_between_steps("loading the state of frozen parameters", BEFORE_STEP)
            names = ", ".join(self._step.chunks[index].names() for index in sorted(wanted))
            self._replan(self._flags, f"state loaded for frozen {names}", wanted=wanted)
        # State that is loaded for trained parameters, too, may be other than the plan counts.
        self.follow_optimizer("state loaded")

    def discard_state(self, discarded: Sequence[ManagedParameter]) -> None:
        """Give up master, moments and step counts of frozen parameters, and the memory of chunks that keep none.

        Collective. Raises GeminiError if gradients wait for a step, and DivergenceError if ranks name different ones;
        nothing has changed then.
        """
        self._check_between_steps("discard_state()", BEFORE_STEP)
        step, optimizer = self._step, self._manager.optimizer
        shown = f"state given up: {', '.join(each.name for each in discarded)}"
        # Before anything changes: ranks that name different parameters must keep their state.
        step.communicator.agree(shown.encode(), "discard_state()", remedy="All ranks must give up the same state")
        # Edits go home first: masters are made from the weights there.
        step.binding.write_back_all()
        # This comes before the plan, which keeps whatever state the chunks of frozen parameters still have.
        for each in discarded:
            if Kind.MASTER in each.chunk.homes:
                master_from_weights(each.chunk, each)
            each.discard_fractions()
            if optimizer is not None:
                optimizer.states.discard(each)
        self._replan(self._flags, shown)

    def offload(self, kinds: Collection[Kind]) -> None:
        """Move states of these kinds off the device, until `reload` or the next use of the model. Collective.

        Raises GeminiError if gradients wait for a step or parameters are in use, BudgetError if the host has no room,
        and DivergenceError if ranks offload different states; nothing has changed then.
        """
        with self._replanning.between_steps("offload_states()"):
            plan, shown = offloaded(self._manager.plan, kinds), f"offloaded: {', '.join(sorted(kinds))}"
            self._manager.change_plan(plan, shown, *_OFFLOADED)
            # Slots and buffers are no states, but they hold device memory too.
            self._manager.give_room()

    def reload(self) -> None:
        """Put offloaded states where the policy wants them again. Collective if there are any. Raises as `offload`."""
        if self._manager.plan.offloaded:
            with self._replanning.between_steps("reload_states()"):
                self._replan(self._flags, "states reloaded", _OFFLOADED)

    def before_use(self) -> None:
        """The model is about to be used: reload, if nothing prevents it; follow free memory and the kind of use.

        Collective then. States that cannot come back now are used where they are.
        """
        # Offloaded states come back first, because what follows is not possible while a state is offloaded.
        if self._manager.plan.offloaded and not (self._replanning.gradients_wait or self._manager.is_in_use):
            self.reload()
        if self._live.follow():
            self._note_graphs()
        self._follow_use(torch.is_grad_enabled())

    def change_budgets(self, settings: Settings, free: FreeBytes, named: Collection[str]) -> None:
        """Make homes and slots follow the budgets of `settings`, and `free` where those name none. Collective.

        named: the budgets that change; what the others leave to model data stays.
        Raises as `offload` does; BudgetError also if the device has no room.
        """
        words = [f"{name}={settings.budget_bytes(name)}" for name in BUDGETS]
        before = self._manager.plan
        # `free` was read just now, but what activations take is known from earlier steps only.
        known = replace(free, activations=self._free.activations, fraction=before.activation_fraction)
        budget = Budget.of(settings, known)
        # If the user names host_memory= alone, the device keeps the budget that it has.
        names_device = named != {"host_memory"}
        budget = Budget(
            budget.device if names_device else before.budget.device,
            # what was free at wrapping may be too little for states that leave the device now
            budget.host if "host_memory" in named else before.budget.wider(budget).host,
        )
        with self._replanning.between_steps("change_budgets()"):
            self._replan(self._flags, f"budgets: {', '.join(words)}", BUDGETED, settings=settings, budget=budget)
        if names_device:
            self._free.reset_shortage()  # shortages from before say nothing about these budgets

    def change_settings(self, settings: Settings, shown: str) -> None:
        """Put settings in force that an optimizer brings: where masters and its states rest. Collective if they differ.

        They may name a disk if the model has none, but no other one. shown: those that may differ, in words. Raises
        ValueError if the folder takes no file, and as `change_budgets`; nothing has changed then.
        """
        manager, before = self._manager, self._manager.plan.settings
        if settings == before:
            return
        memory = manager.memory
        opens = settings.disk_path is not None and before.disk_path is None
        with self._replanning.between_steps(shown):
            try:
                if settings.disk_path is not None and opens:
                    # One rank alone may find that its folder takes no file: the others hear of it where they agree.
                    memory.open_disk(DiskTier(Path(settings.disk_path), checks=settings.disk_checksums))
                self._replan(self._flags, shown, _BROUGHT, settings=settings)
            except BaseException:
                # A move that ended half way may have left states there.
                if opens and memory.disk is not None and not memory.disk.ledger.total_bytes:
                    memory.drop_disk()
                raise

    def change_operators(self, shown: str, operators: tuple[OperatorSpec, ...]) -> None:
        """Put another plan in force because operators have changed; what is trained has not. Collective.

        Raises what `apply_flags` raises.
        """
        step = self._step
        self._check_between_steps(shown)
        self._replan(self._flags, shown, _COMPILED, operators=operators)
        # A compiled module is one operator: gradients come in another order, and the trace has other events.
        step.grads.reset_order()
        step.params.next_use.reset_trace()

    def before_graph(self) -> None:
        """A graph is about to be built, or a gradient to be set: put the plan for training in force. Collective then.

        The plan stays while states cannot move. Raises nothing if training does not fit: backward does.
        """
        self._follow_use(True)

    def _follow_use(self, builds_graph: bool) -> None:
        purpose = self.purpose
        if purpose.is_followed(builds_graph) or not self._replanning.is_possible:
            return
        with self._replanning.between_steps("a first use"):
            if builds_graph:
                purpose.begin_graph()
                # Nothing watches for graphs any more. What was unfrozen since is left: its memory follows next.
                self.flags_raised.difference_update([number for number, flag in enumerate(self._flags) if flag])
            else:
                purpose.infer()
                self._note_graphs()

    def _note_graphs(self) -> None:
        """Watch for graphs of all trained parameters: memory does not follow their flags yet."""
        if self._manager.training.may_begin:
            self.flags_raised.update(number for number, flag in enumerate(self._flags) if flag)

    def _check_between_steps(self, what: str, when: str = "between the micro-batches of a step") -> None:
        """Raises GeminiError if another plan could not be carried out now."""
        self._replanning.refuse_inside(what, when)
        # Backward passes that produced input gradients only: no gradient of a parameter is lost.
        if self._step.grads.num_backwards:
            self._step.grads.discard_all()

    def _change(self, flags: list[bool]) -> None:
        """Replan for other flags. Does nothing if that has to wait for the step."""
        pairs = list(zip(self._managed, flags, strict=True))
        frozen = [each for each, flag in pairs if each.requires_grad and not flag]
        unfrozen = [each for each, flag in pairs if flag and not each.requires_grad]
        # A freeze can wait for the step: the waiting gradients still need their memory.
        if self._replanning.gradients_wait and not unfrozen:
            return
        names = [", ".join(each.name for each in some) or "none" for some in (frozen, unfrozen)]
        self._check_between_steps(f"{names[1]} were unfrozen" if unfrozen else f"{names[0]} were frozen")
        # Gradients that no step has used, and zeros, are of what was trained before.
        self._step.grads.discard_all()
        self._replan(flags, f"frozen: {names[0]}; unfrozen: {names[1]}")
        for each in frozen + unfrozen:
            # Only now: after a refusal the old flags must still be those that memory follows.
            each.follow_flag()
        # Which gradients backwards expect, and whether some are fp16 and need a loss scale, follows from the flags.
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
        """Make another plan and put it in force."""
        with refused_after(shown):
            self._manager.change_plan(self._replanning.planned(flags, wanted, **changes), shown, *change)
        # A plan in force for inference has dropped an earlier refusal to train, so graphs are watched for again.
        self._note_graphs()
