"""Which plan the free memory asks for, and the change to it between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

import torch

from gemini.errors import BudgetError, GeminiError
from gemini.log import get_dist_logger
from gemini.memory.modes import uncollected
from gemini.monitor.live import LiveBytes
from gemini.monitor.readings import HostSource, share_of_host
from gemini.placement.budget import Budget, FreeBytes, is_less
from gemini.placement.demand import Kind, format_bytes
from gemini.placement.host_room import (
    check_host_room,
    check_host_room_for_steps,
    has_host_room_for_steps,
    refuses_unannounced,
)
from gemini.placement.plan import Plan
from gemini.placement.planning import (
    PlanChanges,
    ShortageCap,
    bounded_in_words,
    budget_after_shortage,
    budget_for_bound,
    budget_to_follow,
    followed_in_words,
    has_room_for,
    micro_batches_in_words,
    optimizer_in_words,
    peak_in_words,
    replan,
    states_in_words,
)
from gemini.runtime.chunk import Chunk, ManagedParameter
from gemini.runtime.manager import ChunkManager

# -- Reads the host's free memory again if a plan needs more than there was.
#
# Host memory is read when a model is wrapped, beside whatever the script holds then: a checkpoint that was just loaded,
# a dataset. Much of that may be free when training begins, so an old reading refuses nothing.


class HostRoom:
    """The host memory of one model on this rank."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._ledger = manager.memory.host.ledger
        self._communicator = manager.communicator
        self._source = HostSource()

    def read(self, budget: Budget) -> Budget:
        """`budget` with the host's current room if that is more, the minimum over ranks. Collective; raises nothing.

        A bound that the user gave stays.
        """
        plan = self._manager.plan
        if budget.host is None or plan.settings.host_memory is not None:
            return budget
        # What this model holds on the host already is not free, but it is its own to use.
        room = share_of_host(self._source.read().available_bytes) + self._ledger.total_bytes
        (agreed,) = self._communicator.least((room,), "free host memory")
        return replace(budget, host=max(budget.host, agreed))


# -- The budget that one model's data should have now, from the free memory at each step, and after a shortage.
#
# [Note: Shortage] A forward or backward that finds no device memory ends with an exception like any other: on all ranks
# the gradients since the last step are dropped, and weights and optimizer state are those of that step. So they are
# after a step that finds no memory: it takes all of it before it changes anything. The shortage is found at the next
# use of the model. torch counts how often a device ran out of memory, whoever catches the exception. Ranks compare
# their counts after a failure and at every step; if one has grown, model data gives up a part of the device before
# anything runs. The next reading does not give it back: it would be as wrong as the one before.
#
# [Note: First batch] Until a step has shown its activations, model data leaves a part of the device to them by default.
# A first batch that needs more would run out of memory, and its step would be dropped. So the first forward with
# gradients asks for an upper bound of what its batch takes (gemini/model/workload.py). If that is more than the
# default leaves, chunks make room before the forward runs. The bound may be twice what the step takes, or more, so
# nothing else follows from it: it gives no room to model data, it refuses nothing, and the first step's figures replace
# it. Ranks compare their bounds once in such a forward, and never after the first step.


_MOST_BOUNDS = 8  # forwards with gradients that may ask for one: a script may never step


class FreeMemory:
    """The budgets of one model. Every decision follows from numbers that all ranks have agreed on."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._live = manager.live
        self._communicator = manager.communicator
        self._failures = manager.step.failures
        self._seen: LiveBytes | None = None
        self._refused_bytes: int | None = None  # device budget that no plan could keep to
        self._cap = ShortageCap()
        self._is_first = True  # no reading of a step was followed so far
        self._has_told_least = False
        self.room: int | None = None
        """What the device had for model data by the last reading. None: any amount, or it was not read."""
        self.activations: int | None = None
        """The most bytes that a step took besides model data, as far as steps have shown."""
        self._num_bounds_due = _MOST_BOUNDS
        self.most_activations: int | None = None
        """This rank's bound of what the batch of the coming forward takes besides model data; None: unknown."""
        self.is_short = False
        """The device ran out of memory, and model data has not given up room since."""

    def look(self) -> bool:
        """Read what the last step has measured. Collective after a failure, which all ranks have had.

        False if `wanted` has nothing to follow, as in most uses of a model.
        """
        seen = self._live.pop_agreed()
        if seen is not None:
            # Only steps leave a reading, and the cap counts steps.
            self._cap.step()
        if self._failures.pop_failure():
            # The failed step made no agreed reading, so ranks compare their counts of shortages here.
            words = torch.tensor(self._live.shortage(), dtype=torch.int64, device=self._communicator.device)
            self._communicator.all_reduce_max_(words, "shortage of memory")
            self._live.agree_on_shortage(words.tolist())
            # A failure for another reason brings no new reading: only steps are followed.
            after = self._live.pop_agreed()
            seen = after if after is not None and after.is_short else seen
        if seen is not None:
            # `is_short` has these failures on all ranks now. The next step must not report them once more.
            self._live.forgive()
            self.is_short = self.is_short or seen.is_short
        self._seen = seen
        if seen is not None:
            self.activations, self._num_bounds_due = seen.activations, 0
        return seen is not None or self.is_short

    def wanted(self, plan: Plan) -> Budget | None:
        """The budget for the next plan; None if the plan may stay. Local."""
        seen, is_short = self._seen, self.is_short
        # A reading is followed once, whatever comes of it: not again at each forward until the next step.
        self._seen, self.is_short, self.room = None, False, None
        if seen is None and not is_short:
            return None
        # A fixed `model_data_memory` follows no readings, but a shortage makes it smaller, too.
        now = plan.budget
        if seen is not None and plan.settings.model_data_memory is None:
            now = Budget.of(plan.settings, FreeBytes(seen.free, plan.budget.host, seen.activations))
        # A shortage outweighs the reading, which was wrong. The cap keeps later readings below the new budget.
        if is_short:
            budget = budget_after_shortage(plan, now)
            if budget is None:
                self._tell_least(plan)
            else:
                self._cap.set(budget.device)
            return budget
        now, is_first = self._cap.bound(now), self._is_first
        self._is_first, self.room = False, now.device
        budget = budget_to_follow(plan, now, is_first)
        self._note_lack(plan, budget)
        refused = self._refused_bytes
        # Not asked for again: no plan keeps to the refused budget or less.
        if budget is None or (refused is not None and budget.device is not None and budget.device <= refused):
            return None
        return budget

    def asks_for_bound(self, plan: Plan) -> bool:
        """No step has shown its activations yet, and the budget depends on them. Local, and equal on all ranks."""
        return self._num_bounds_due > 0 and plan.budget.device is not None and plan.settings.model_data_memory is None

    def note_bound(self, most_activations: int | None) -> None:
        """What the coming forward takes at most besides model data, on this rank. None: unknown. Local."""
        self.most_activations = most_activations

    def bounded(self, plan: Plan) -> tuple[Budget, int] | None:
        """The budget for the next plan, and what the batch takes at most; None if the plan may stay. Collective.

        Called only if `asks_for_bound`. See [Note: First batch].
        """
        # The bound is of this batch only, so it is used up here.
        most, self.most_activations = self.most_activations, None
        words = torch.tensor(self._live.bound(most), dtype=torch.int64, device=self._communicator.device)
        self._communicator.all_reduce_max_(words, "activations of the first batch")
        # Counted after the collective: a rank that failed on its way here has not counted either.
        self._num_bounds_due -= 1
        agreed = self._live.agree_on_bound(words.tolist())
        if agreed is None:
            return None
        # Both budgets follow from the same reading, so that they differ by the bound alone.
        known = FreeBytes(agreed.free, plan.budget.host, fraction=plan.activation_fraction)
        bounded_budget = Budget.of(plan.settings, replace(known, most_activations=agreed.activations))
        # The bound asks for no more than the default leaves to activations.
        if bounded_budget == Budget.of(plan.settings, known):
            return None
        budget = budget_for_bound(plan, bounded_budget)
        return None if budget is None or agreed.activations is None else (budget, agreed.activations)

    def budget_after_shortage(self, plan: Plan) -> Budget | None:
        """The budget in place of `plan`'s, for which a device had no memory. None: it cannot be less.

        Local, and equal on all ranks. The next step does not find this shortage again.
        """
        # The figures are not needed: the call counts the shortage as handled.
        self._live.shortage()
        budget = budget_after_shortage(plan, plan.budget)
        if budget is not None:
            self._cap.set(budget.device)
        return budget

    def restart(self) -> None:
        """Another plan, which keeps to the budget, is in force."""
        self._refused_bytes = None

    def reset_shortage(self) -> None:
        """The user has set other budgets: forget shortages and refusals."""
        self._refused_bytes, self.is_short, self._cap = None, False, ShortageCap()

    def refuse(self, budget: Budget, why: str) -> None:
        """No plan keeps to this budget: warn once, and let the plan in force stay. Local.

        An exception would end a training that may well go on: the process that took the device's memory may give it
        back.
        """
        self._refused_bytes = budget.device
        words = f"the device has room for {budget.device} bytes of model data, but states stay where they are: {why}"
        get_dist_logger().warning(words, ranks=[0])

    def stay(self, plan: Plan, refusal: BudgetError) -> None:
        """The device has no memory for more than `plan`, the plan in force, whatever was read: rank 0 warns. Local.

        Nothing is lost, and no step ran short: the next reading does not find this shortage again.
        """
        # As above, this call counts the shortage as handled.
        self._live.shortage()
        # The device has what the plan in force takes. The rest of its budget may not be there.
        self._cap.set(plan.device_bytes)
        get_dist_logger().warning(f"states stay where they are: {refusal}", ranks=[0])

    def find_peak(self, has_failed: bool) -> str | None:
        """The event of a step with the most activations on this rank, in words; None if none was recorded. Local.

        has_failed: see `Recorder.find_peak`.
        """
        event = self._manager.recorder.find_peak(has_failed=has_failed)
        return None if event is None else self._manager.trace.describe(event)

    def _note_lack(self, plan: Plan, budget: Budget | None) -> None:
        """Tell once, until there is room again, that `plan` takes more of the device than there is and stays.

        budget: of the plan to come, which tells of itself. None: `plan` stays.
        """
        lacks = self.room is not None and self.room < (plan.device_bytes if budget is None else budget.device or 0)
        if lacks and budget is None and not self._has_told_least:
            words = (
                f"the device has room for {format_bytes(self.room or 0)} of model data, and the "
                f"{format_bytes(plan.device_bytes)} that tensor_placement_policy={plan.policy!r} has there cannot be "
                "less: training goes on for as long as the device has memory for what a step takes"
            )
            get_dist_logger().warning(words, ranks=[0])
        self._has_told_least = lacks

    def _tell_least(self, plan: Plan) -> None:
        words = (
            f"the device ran out of memory{peak_in_words(plan, self.find_peak(has_failed=True))}, and the "
            f"{format_bytes(plan.device_bytes)} of model data on it cannot be less: make the batch smaller, or "
            "checkpoint activations"
        )
        get_dist_logger().warning(words, ranks=[0])


# -- Makes another plan for a model's chunks, from flags, budgets and what frozen chunks still keep.
#
# States move between steps only: not while gradients wait for a step, nor while a payload is in use.


BEFORE_STEP = "between backward() and step()"
OPTIM_CHANGED = "change of optimizer states", "All ranks must make the same optimizer, with the same param groups"


@contextmanager
def refused_after(shown: str) -> Iterator[None]:
    """Around planning and a change of plan: raises BudgetErrors that also say what was done before. Local."""
    try:
        yield
    except BudgetError as error:
        raise error.reworded(f"{shown}. This does not fit: {error}") from None


class Replanning:
    """The plans of one model."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._managed = manager.parameters
        self.host = HostRoom(manager)

    @property
    def flags(self) -> list[bool]:
        """By parameter: whether it is trained, as far as memory has followed."""
        return [each.requires_grad for each in self._managed]

    @uncollected()
    def planned(
        self,
        flags: Sequence[bool],
        wanted: Mapping[int, frozenset[Kind]] | None = None,
        **changes: Unpack[PlanChanges],
    ) -> Plan:
        """Another plan for the chunks. `wanted`: states that frozen chunks get, by index. Raises BudgetError.

        If training needs more of the host than was free, free memory is read again: collective then, else local. For
        inference it is not read: each rank infers on its own, and a collective would wait for ever.
        """
        plan = self._planned(flags, wanted, **changes)
        if plan.infers or has_host_room_for_steps(plan, refuses_unannounced(plan)):
            return plan
        # Every rank has made the same plan from agreed numbers, so either all of them come to this collective or none.
        roomier = self.host.read(plan.budget)
        if roomier == plan.budget:
            return plan
        changes["budget"] = roomier
        return self._planned(flags, wanted, **changes)

    def _planned(
        self,
        flags: Sequence[bool],
        wanted: Mapping[int, frozenset[Kind]] | None = None,
        **changes: Unpack[PlanChanges],
    ) -> Plan:
        infers = changes.get("infers", self._manager.plan.infers)
        # A plan for inference trains nothing: every chunk keeps what training has left.
        trained = set() if infers else {each.chunk.index for each, flag in self._pairs(flags) if flag}
        # A frozen chunk keeps its state: see [Note: Frozen state].
        kept = {
            chunk.index: self._left_by_training(chunk) | (wanted or {}).get(chunk.index, frozenset())
            for chunk in self._manager.chunks
            if chunk.index not in trained
        }
        optimizer = self._manager.optimizer
        if optimizer is not None and "optim_states" not in changes:
            # Without these numbers the plan would count the states of the plan before, at first those of Adam.
            changes["optim_states"] = optimizer.states.state_counts(self._manager.chunks)
        return replan(self._manager.plan, flags, kept, **changes)

    def fitting(self, **changes: Unpack[PlanChanges]) -> Plan:
        """Another plan for what is trained now, which also fits the host. Raises BudgetError if there is none.

        It follows from numbers that ranks agree on. Collective like `planned`.
        """
        plan = self.planned(self.flags, **changes)
        check_host_room(plan, tuple(Kind))
        check_host_room_for_steps(plan)
        return plan

    @property
    def gradients_wait(self) -> bool:
        """A backward since the last step has reached trained parameters. Local."""
        # If nothing is trained, backwards only make gradients of inputs, and none of them waits.
        gradients = self._manager.step.grads
        return bool(gradients.num_backwards and gradients.places.gradients)

    @property
    def is_possible(self) -> bool:
        """Whether states may move now, and are where the plan in force wants them. Local, and equal on all ranks."""
        return not (self._manager.plan.offloaded or self.gradients_wait or self._manager.is_in_use)

    def refuse_inside(self, what: str, when: str) -> None:
        """Raises GeminiError if memory cannot move now. Local, and equal on all ranks."""
        if self.gradients_wait:
            raise GeminiError(f"{what} {when}: do it after step() or zero_grad()")
        self.refuse_in_use(what)

    def refuse_in_use(self, what: str) -> None:
        """Raises GeminiError inside GatheredParameters. Local, and equal on all ranks."""
        if self._manager.is_in_use:
            raise GeminiError(f"inside GatheredParameters(...) nothing can change: {what}")

    @contextmanager
    def between_steps(self, what: str) -> Iterator[None]:
        """Around a change of plan; an exception is told to the other ranks. Raises GeminiError inside a step."""
        # All ranks raise this alike. Published, it would count as a failure and drop the gradients.
        self.refuse_inside(what, BEFORE_STEP)
        # The first use may be inside torch.inference_mode(): memory taken in it could not be written to outside.
        with self._manager.step.publishing(), torch.inference_mode(False), torch.no_grad():
            yield

    def _pairs(self, flags: Sequence[bool]) -> zip[tuple[ManagedParameter, bool]]:
        return zip(self._managed, flags, strict=True)

    def _left_by_training(self, chunk: Chunk) -> frozenset[Kind]:
        """The chunk's states that cannot be made from others. See [Note: Frozen state]."""
        kept, optimizer = set(), self._manager.optimizer
        # A master without fractions equals the weights, and an optimizer state without a step is zeros: neither is
        # kept.
        if Kind.MASTER in chunk.homes and any(each.has_fractions for each in chunk.parameters):
            kept.add(Kind.MASTER)
        if optimizer is not None and optimizer.states.has_stepped(chunk):
            kept.add(Kind.OPTIM)
        return frozenset(kept)


# -- Makes the plan in force follow what steps show: free memory, a batch's activations, micro-batches per step.
#
# All ranks have agreed on whatever it follows, so they come to the same plan. States move before a forward, between
# steps.


BUDGETED = "change of budgets", "All ranks must allow the same bytes at the same step"
_ADDED_UP = "change of micro-batches", "All ranks must run as many backwards between two steps"


class LivePlan:
    """The changes of one model's plan that steps ask for."""

    def __init__(self, manager: ChunkManager, replanning: Replanning, free: FreeMemory) -> None:
        self._manager = manager
        self._replanning = replanning
        self._free = free
        self._device = manager.memory.device

    def follow(self) -> bool:
        """Put another plan in force if steps ask for one; True if there is another one. Collective then."""
        # All run, whatever the first ones return: a step may show several changes.
        follows = [self._follow_memory(), self._follow_micro_batches(), self._follow_states()]
        return any(follows)

    def _follow_memory(self) -> bool:
        """Follow a device that has more or less room by now, or that ran out of memory."""
        before, free = self._manager.plan, self._free
        # `is_possible` looks at all chunks, so it comes last: a loop with GatheredParameters asks for each parameter.
        if not free.look() or not self._replanning.is_possible:
            return False
        is_short = free.is_short  # `wanted` resets it
        with uncollected():  # the least budget of the plan may have to be found
            budget = free.wanted(before)
        if budget is None:
            return False
        try:
            plan = self._replanning.fitting(budget=budget)
        except BudgetError as error:
            free.refuse(budget, str(error))
            return False
        # Under a smaller budget something may have to go although no home moves: sums of gradients that no plan counts,
        # see `ChunkManager._carry_out`.
        if _are_alike(plan, before) and not is_less(plan.budget.device, before.budget.device):
            # The policy wants no more of the device than before: nothing has to move.
            self._manager.adopt(plan)
            return True
        if not self._keep_to(plan, f"{'shortage of' if is_short else 'free'} memory"):
            return False
        peak, now = free.find_peak(is_short), self._manager.plan
        words = followed_in_words(before, now, free.activations, is_short, peak, free.room)
        (get_dist_logger().warning if is_short else get_dist_logger().info)(words, ranks=[0])
        return True

    def _follow_micro_batches(self) -> bool:
        """Follow steps that add up another number of backwards than the plan is for.

        If no such plan fits, the one in force stays: sums take what memory they find beside it.
        """
        before, steps = self._manager.plan, self._manager.micro_batches
        if not steps.have_changed or not self._replanning.is_possible:
            return False
        # The number is noted even if nothing comes of it: one that no plan fits must not be tried at every forward.
        number = steps.follow()
        # A number that the user has set counts, whatever steps show.
        if before.settings.gradient_accumulation_steps is not None or number == before.demand.micro_batches:
            return False
        try:
            plan = self._replanning.fitting(micro_batches=number)
        except BudgetError:
            return False
        if _are_alike(plan, before):
            # Nothing moves, but the new plan predicts other steps.
            self._manager.adopt(plan)
            return True
        with self._replanning.between_steps("following micro-batches"):
            if self._manager.try_plan(plan, f"steps of {number} micro-batches", *_ADDED_UP) is not None:
                return False
        if plan.placement != before.placement:
            get_dist_logger().info(micro_batches_in_words(before, plan), ranks=[0])
        return True

    def _follow_states(self) -> bool:
        """Follow an optimizer that has, or needs, other numbers of states than the plan counts.

        If no such plan fits, the one in force stays, and states that it has no room for rest on the host.
        """
        before, optimizer = self._manager.plan, self._manager.optimizer
        if optimizer is None or not optimizer.states.have_changed or not self._replanning.is_possible:
            return False
        # This, too, is noted even if nothing comes of it.
        optimizer.states.note_followed()
        numbers = optimizer.states.state_counts(self._manager.chunks)
        if has_room_for(before, numbers):
            return False
        try:
            plan = self._replanning.fitting()
        except BudgetError:
            return False
        with self._replanning.between_steps("following the optimizer's states"), uncollected():
            if self._manager.try_plan(plan, states_in_words(numbers), *OPTIM_CHANGED) is not None:
                return False
        get_dist_logger().info(optimizer_in_words(before, plan), ranks=[0])
        return True

    def make_room(self) -> None:
        """Make room for the first batch's activations, if a bound is known. See [Note: First batch]. Collective."""
        before, free = self._manager.plan, self._free
        if not self._replanning.is_possible:
            return
        found = free.bounded(before)
        if found is None:
            return
        budget, most_activations = found
        try:
            plan = self._replanning.fitting(budget=budget)
        # As a bound may be far too high, it refuses nothing: the step may fit nevertheless.
        except BudgetError:
            return
        if not self._keep_to(plan, "a bound of activations"):
            return
        get_dist_logger().info(bounded_in_words(before, self._manager.plan, most_activations), ranks=[0])

    def _keep_to(self, plan: Plan, why: str) -> bool:
        """Put a plan in force that keeps to another budget. Collective.

        False if the free memory has been taken since: all states are where they were, and a warning says so. An
        exception would end a training that may well go on.
        """
        shown = f"{why}: room for {plan.budget.device} bytes of model data"
        with self._replanning.between_steps("following free memory"), uncollected():
            refused = self._manager.try_plan(plan, shown, *BUDGETED)
            self._device.trim()  # torch's allocator would keep from others what the model gave up
        if refused is None:
            self._free.restart()
        elif refused.is_shortage:
            self._free.stay(self._manager.plan, refused)
        # The host has no memory for the states that would leave the device.
        else:
            self._free.refuse(plan.budget, str(refused))
        return refused is None


def _are_alike(plan: Plan, before: Plan) -> bool:
    """Whether both plans put everything in the same places, with the same bytes."""
    # Homes on the same tiers may differ in bytes: by sums of micro-batches, or by the number of optimizer states.
    return plan.placement == before.placement and _bytes_of(plan) == _bytes_of(before)


def _bytes_of(plan: Plan) -> tuple[int, list[dict[Kind, int]]]:
    return plan.demand.scratch_bytes, [chunk.home_bytes for chunk in plan.demand.chunks]
