"""What a model is used for: it infers until something trains it, and the plan in force follows.

[Note: Inference first] A model is wrapped with the plan for training if that fits, so that a model which is trained at
once moves nothing. Its first forward without gradients puts a plan for inference in force: parameters get the room of
gradients, moments and reduction buffers. Training begins with an optimizer or, without one, where the first graph is
built: a backward would be too late, as autograd has saved parameters at home on the device as they are. Then the plan
for training is put in force, for good. If it does not fit, an optimizer is refused. A graph is not: many scripts that
only infer forget torch.no_grad(). The backward is refused then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from gemini.errors import BudgetError
from gemini.log import get_dist_logger
from gemini.memory.modes import uncollected
from gemini.placement.budget import is_less
from gemini.placement.demand import OPTIM_STATES, format_bytes
from gemini.placement.plan import Plan
from gemini.placement.planning import PlanChanges, budget_after_shortage, has_room_for, states_in_words
from gemini.placement.search import are_alike, with_least
from gemini.replan.live_plan import OPTIM_CHANGED, FreeMemory, Replanning
from gemini.runtime.manager import ChunkManager

_BEGUN = (
    "beginning of training",
    "All ranks must make the optimizer, or run a forward with gradients, at the same point",
)
_INFERS = "use for inference", "All ranks must run the same forwards, with gradients or without"


class Purpose:
    """The use of one model."""

    def __init__(self, manager: ChunkManager, replanning: Replanning, free: FreeMemory) -> None:
        self._manager = manager
        self._replanning = replanning
        self._free = free
        self._device = manager.memory.device
        self._may_infer = any(replanning.flags)  # nothing has trained it yet, and a plan for inference was not refused
        self._aside: tuple[Plan, Plan] | None = None
        """(plan for inference, plan for training) with the same homes and slots: the first stands for the second."""

    def is_followed(self, builds_graph: bool) -> bool:
        """Whether the plan in force is the one for this use already, or has to stay."""
        # `begin_graph` is due at the first graph also if the plan in force is for training: it ends `_may_infer`.
        infers = self._manager.plan.infers
        if builds_graph:
            return not self._may_infer and (not infers or self._manager.training.refused is not None)
        return infers or not self._may_infer

    def infer(self) -> None:
        """A forward without gradients is about to begin, between steps: put a plan for inference in force.

        Only if nothing has trained the model so far. Collective if states move. The plan in force stays if it finds no
        room.
        """
        before = self._manager.plan
        # If there is no room, that must not be tried again at every forward.
        self._may_infer = False
        try:
            plan = self._replanning.fitting(infers=True)
        except BudgetError:
            return
        if are_alike(before, plan):
            # Nothing moves, and other ranks need not infer. With the same hash the ranks' tags still match.
            plan = replace(plan, hash=before.hash)
            self._aside = plan, before
            self._manager.adopt(plan)
        elif self._manager.try_plan(plan, "inference without an optimizer", *_INFERS) is not None:
            return
        self._may_infer = True

    def begin_graph(self) -> None:
        """A graph is about to be built, between steps: begin training. If there is no room, the backward raises."""
        self._may_infer = False
        if self._manager.training.may_begin:
            error = self._try_training("a graph of trained parameters")
            if error is not None:
                self._manager.training.refuse(error)

    def begin_training(self, shown: str, optim_states: Sequence[float]) -> None:
        """Put the plan for training in force, if the model has only inferred so far or the plan counts other states.

        shown: what begins training. optim_states: how many states per element the optimizer keeps, by chunk index. If
        nothing may move now, the plan follows these at the next forward. Collective if states move. Raises BudgetError,
        alike on all ranks, if there is no room; the plan in force then stays.
        """
        manager, plan, error, change = self._manager, self._manager.plan, None, _BEGUN
        # The plan of wrapping counts Adam's two states for each trained chunk.
        pairs = zip(manager.chunks, optim_states, strict=True)
        is_usual = all(number == OPTIM_STATES for chunk, number in pairs if chunk.trainable)
        # Ranks agree on these words, so that those which make other optimizers are told so.
        if not is_usual:
            shown, change = f"{shown} with {states_in_words(optim_states)}", OPTIM_CHANGED
        if plan.infers:
            # This cannot wait for the next forward, as below: the plan for inference has no room for training.
            self._replanning.refuse_in_use(shown)
            refused = manager.training.refused
            # What was refused before was a plan with Adam's states: for others it is tried again.
            error = refused if is_usual and refused is not None else self._try_training(shown, optim_states, change)
        elif not has_room_for(plan, optim_states) and self._replanning.is_possible:
            error = self._try_training(shown, optim_states, change)
        if error is not None:
            error = with_least(error, manager.plan, max(optim_states))
            raise error.reworded(str(error))  # another object each time, as a kept one would keep its traceback
        self._may_infer = False

    @contextmanager
    def beginning_training(self, shown: str, optim_states: Sequence[float]) -> Iterator[None]:
        """Inside, the plan for training is in force. An exception in the block lets the model infer again.

        The arguments are those of `begin_training`. Collective. Raises BudgetError, alike on all ranks, if training
        does not fit; the model then goes on inferring.
        """
        with self._manager.step.publishing(), torch.inference_mode(False), torch.no_grad():
            try:
                self.begin_training(shown, optim_states)
                yield
            except BaseException:
                # Nothing has trained the model: the next forward without gradients may put a plan for inference in
                # force.
                self._may_infer = True
                raise

    @uncollected()
    def may_make_room(self) -> bool:
        """Whether model data on the device could be less, and states may move now. Local, and equal on all ranks."""
        manager = self._manager
        # A backward before the optimizer has taken the memory already: then there is nothing to make room for.
        if manager.training.is_there or manager.is_in_use:
            return False
        return budget_after_shortage(manager.plan, manager.plan.budget) is not None

    def make_room(self) -> bool:
        """Shrink model data on the device: a rank has no memory for training. Nothing for training is held now.

        Model data gives up a part of the device, as after a shortage in a step. Collective, inside
        `beginning_training()`. False, and nothing has changed, if model data cannot be less.
        """
        if not self.may_make_room():
            return False
        before = self._manager.plan
        budget = self._free.budget_after_shortage(before)
        assert budget is not None
        shown = f"shortage of memory: room for {budget.device} bytes of model data"
        plan = self._replanning.planned(self._replanning.flags, budget=budget)
        if self._manager.try_plan(plan, shown, *_BEGUN) is not None:
            return False
        # torch's allocator would keep what the model gave up.
        self._device.trim()
        self._free.restart()
        self._tell(before.device_bytes, self._manager.plan.device_bytes)
        return True

    def find_host_room(self) -> bool:
        """Read the host's free memory again: the plan's reading has no room for what training needs. Collective.

        False if there is no more than before; else the plan in force has the new reading.
        """
        plan = self._manager.plan
        budget = self._replanning.host.read(plan.budget)
        if budget == plan.budget:
            return False
        # Every home stays where it is, so nothing has to move: only the bound of the host is another one.
        self._manager.adopt(replace(plan, budget=budget))
        return True

    def _try_training(
        self, shown: str, optim_states: Sequence[float] | None = None, change: tuple[str, str] = _BEGUN
    ) -> BudgetError | None:
        """Put the plan for training in force. Collective. Returns why not, if the plan in force has to stay.

        optim_states: as in `begin_training`. None: those that the plan in force counts.
        """
        manager, changes = self._manager, PlanChanges(infers=False, budget=self._manager.plan.budget)
        if optim_states is not None:
            changes["optim_states"] = optim_states
        # The plan for inference has moved nothing, so there is nothing to move back or to agree on.
        # Any other plan that has come into force since then, as for other budgets, may have other homes.
        if self._aside is not None and self._aside[0] is manager.plan:
            if optim_states is None or has_room_for(self._aside[1], optim_states):
                manager.adopt(self._aside[1])
                return None
        at_first = manager.plan.budget
        before = manager.plan.device_bytes
        while True:
            try:
                plan = self._replanning.planned(self._replanning.flags, **changes)
            # Plans follow from agreed numbers only, so all ranks return this refusal, or none does.
            except BudgetError as error:
                return error
            refused = manager.try_plan(plan, shown, *change)
            if refused is None:
                if is_less(plan.budget.device, at_first.device):
                    self._tell(before, plan.device_bytes)
                return None
            # A device had less memory than the plan asks for: try with less of it, until model data cannot be less.
            less = self._free.budget_after_shortage(plan) if refused.is_shortage else None
            if less is None:
                return refused
            changes["budget"] = less

    @staticmethod
    def _tell(before: int, after: int) -> None:
        words = (
            "the device ran out of memory when training began: model data makes room, "
            f"{format_bytes(after)} of it rest there, after {format_bytes(before)}"
        )
        get_dist_logger().warning(words, ranks=[0])
