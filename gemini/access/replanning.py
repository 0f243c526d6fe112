"""Makes another plan for a model's chunks, from flags, budgets and what frozen chunks still keep.

States move between steps only: not while gradients wait for a step, nor while a payload is in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Unpack

import torch

from gemini.access.host_room import HostRoom
from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.errors import BudgetError, GeminiError
from gemini.manager.chunk_manager import ChunkManager
from gemini.memory.collector import uncollected
from gemini.placement.demand import Kind
from gemini.placement.plan import Plan, PlanChanges, replan
from gemini.placement.refusals import check_host_room, check_host_room_for_steps, has_host_room_for_steps

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
        if plan.infers or has_host_room_for_steps(plan):
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
        return bool(gradients.num_backwards and gradients.memory.gradients)

    @property
    def is_possible(self) -> bool:
        """Whether states may move now, and are where the plan in force wants them. Local, and equal on all ranks."""
        return not (self._manager.plan.offloaded or self.gradients_wait or self._manager.is_in_use)

    def refuse_inside(self, what: str, when: str) -> None:
        """Raises GeminiError if memory cannot move now. Local, and equal on all ranks."""
        if self.gradients_wait:
            raise GeminiError(f"{what} {when}: do it after step() or zero_grad()")
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
