"""Freezing and unfreezing while a model is trained: `requires_grad` of wrapped parameters may change at any time.

The flag is the parameter's own, so what it means for a graph is what it means in plain PyTorch. Memory follows at a
boundary: the first forward with gradients after a step, or after zero_grad(). There a chunk whose last trainable
parameter was frozen gives gradient, master and optimizer memory back, one that got its first takes them, and placement
is decided anew. Nothing is packed anew: memory is by chunk.

What is known of a parameter's training ends when it is frozen: moments and step count are dropped, and the fp32 master
of 16-bit weights with them. If it is unfrozen later it starts afresh, from the weights as they are, in whatever chunk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from gemini.chunks.chunk import ManagedParameter
from gemini.errors import BudgetError, GeminiError
from gemini.executor.executor import Executor
from gemini.executor.masters import master_from_weights
from gemini.executor.rehoming import Rehoming, StateOwner
from gemini.model.plan import Plan
from gemini.placement.demand import Kind

_ALIKE = "All ranks must freeze and unfreeze the same parameters at the same step"
_GIVEN_UP = (
    "frozen after they were trained, so their moments and step counts are given up: {names}. If unfrozen they start "
    "afresh. Where models are trained in turns, as in a GAN, freeze neither: zero_grad() the one that shall stay"
)


class Freezing:
    """Which parameters of a model are trained, and what follows from a change."""

    def __init__(
        self,
        executor: Executor,
        managed: list[ManagedParameter],
        plan: Plan,
        replan: Callable[[list[bool]], Plan],
    ) -> None:
        """replan: the plan for chunks as they say they are trainable, and the parameters' flags; may raise."""
        self._executor = executor
        self._managed = managed
        self._replan = replan
        self._flags = [each.requires_grad for each in managed]
        self.plan = plan
        self.owner: StateOwner | None = None
        self.unfrozen: set[int] = set()  # indices of parameters that were frozen when the model was wrapped, or later
        executor.settle_flags = self.settle
        executor.settle_unfrozen = self.settle_unfrozen

    def settle(self) -> None:
        """Bring memory in line with the flags, if one has changed. Collective then.

        Raises GeminiError between the micro-batches of a step, BudgetError if there is no room, and DivergenceError
        if ranks differ; nothing has changed then.
        """
        flags = self._flags_now()
        given_up: list[str] = []
        if flags != self._flags:
            with self._executor.publishing(), torch.inference_mode(False), torch.no_grad():
                given_up = self._change(flags)
        self._executor.flags_touched = False
        if given_up:
            warnings.warn(_GIVEN_UP.format(names=", ".join(given_up)), stacklevel=2)

    def settle_unfrozen(self) -> None:
        """`settle` if something was unfrozen, which a graph that is about to be built needs memory for.

        What was only frozen keeps its state until the next forward: it may be trained again by then.
        """
        if any(now and not before for now, before in zip(self._flags_now(), self._flags, strict=True)):
            self.settle()
        self._executor.flags_touched = False

    def _flags_now(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():
            return [each.parameter.requires_grad for each in self._managed]

    def _change(self, flags: list[bool]) -> list[str]:
        """Names of parameters whose moments are given up. Changes nothing if it has to wait for the step."""
        executor = self._executor
        pairs = list(zip(self._managed, flags, strict=True))
        frozen = [each for each, flag in pairs if each.requires_grad and not flag]
        unfrozen = [each for each, flag in pairs if flag and not each.requires_grad]
        names = [", ".join(each.name for each in some) for some in (frozen, unfrozen)]
        if executor.gradients.num_backwards and executor.gradients.trainable:
            if unfrozen:
                raise GeminiError(
                    f"{names[1]} were unfrozen between the micro-batches of a step: do it after step() or zero_grad()"
                )
            return []
        if any(chunk.pins for chunk in executor.chunks):
            raise GeminiError(f"inside GatheredParameters(...) nothing can be frozen or unfrozen: {', '.join(names)}")
        executor.gradients.forget()  # backwards that were about inputs only
        shown = f"frozen: {names[0] or 'none'}; unfrozen: {names[1] or 'none'}"
        stepped = [each.name for each in frozen if self.owner is not None and self.owner.has_stepped(each)]
        self._settle_chunks(flags, shown)
        for each in frozen + unfrozen:
            each.requires_grad = not each.requires_grad
            if each.chunk.trainable:
                if Kind.MASTER in each.chunk.homes:
                    master_from_weights(each.chunk, each)
                if self.owner is not None:
                    self.owner.forget(each)
        executor.gradients.reset_order()
        self.unfrozen.difference_update(each.index for each in frozen)
        self.unfrozen.update(each.index for each in unfrozen)
        self._flags = flags
        return stepped

    def _settle_chunks(self, flags: list[bool], shown: str) -> None:
        """Decide and agree on the new plan, then carry it out."""
        executor, before = self._executor, self.plan
        was_trainable = [chunk.trainable for chunk in executor.chunks]
        trained = {each.chunk.index for each, flag in zip(self._managed, flags, strict=True) if flag}
        try:
            for chunk in executor.chunks:
                chunk.trainable = chunk.index in trained
            plan = self._replan(flags)
            homes = (before.demand, before.placement), (plan.demand, plan.placement)
            rehoming = Rehoming(executor, *homes)
            rehoming.check_room(self.owner)
            words = f"{shown}; model data budget of {plan.budget_bytes} bytes, {plan.placement.num_slots} slots"
            data = f"{plan.hash} {shown}".encode()
            executor.communicator.agree(data, "change of what is trained", words, _ALIKE)
        except BaseException as error:
            for chunk, was in zip(executor.chunks, was_trainable, strict=True):
                chunk.trainable = was
            if isinstance(error, BudgetError):
                raise BudgetError(f"{shown}. This does not fit: {error}") from None
            raise
        if was_trainable != [chunk.trainable for chunk in executor.chunks]:
            with executor.tearing():
                rehoming.carry_out(self.owner)
        executor.communicator.plan_hash = plan.hash
        self.plan = plan
