"""`OptimizerStep`: what all ranks agree on before an update, the update itself, and what follows from it.

Everything that a rank may refuse comes before the step's one all-reduce: a rank that fails there fails while no rank
has changed anything. After it every rank does the same, by the same summary of the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemini.manager.leftovers import Becomes
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.chunk_optimizer import ChunkOptimizer
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.chunk_update import ChunkUpdates
from gemini.optimizer.elementwise import ElementwiseUpdate
from gemini.optimizer.runs import GradientFactors
from gemini.optimizer.scaling import Scaling
from gemini.optimizer.step_report import StepReport
from gemini.optimizer.summary import GradientSummary, compare_settings, settings_of_step, summarize
from gemini.optimizer.untrained import refuse_idle, refuse_ungrouped
from gemini.script import warn_at_script
from optim import clip_coefficient


class OptimizerStep:
    """Carries out the steps of one optimizer, and knows how the last one ended."""

    def __init__(
        self,
        model: ShardedModel,
        states: ChunkStates,
        update: ElementwiseUpdate,
        param_groups: list[dict[str, Any]],
        scaling: Scaling,
        factors: ChunkOptimizer,
        max_norm: float | None,
    ) -> None:
        """max_norm: every step clips to it for which no other clip is requested. None: no clipping."""
        self.grad_norm: Tensor | None = None
        self.last: StepReport | None = None
        self._model = model
        self._manager = manager = model.chunk_manager
        self._states = states
        self._param_groups = param_groups
        self._scaling = scaling
        self._next = factors  # what the next step will apply
        self._max_norm = max_norm
        self._device = manager.memory.device.device
        self._updates = ChunkUpdates(manager.step, states.by_chunk, update, param_groups)

    def request_clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Let the next step clip its gradients so. Returns their norm before that, 0-dim. Collective."""
        with self._manager.step.publishing():
            self._next.request(max_norm, norm_type)
            self._collect()
            summary = self._summarize(norm_type)
            self._next.saw(summary)
        self.grad_norm = torch.tensor(self._true_norm(summary), dtype=torch.float32, device=self._device)
        return self.grad_norm

    def run(self) -> None:
        """Agree on the step in its last all-reduce before the update. A rank that cannot update fails before that."""
        step = self._manager.step
        # Everything that may be refused is checked first, while no rank has changed anything.
        self._updates.refuse_bad_hyperparameters()
        refuse_ungrouped(self._model, self._states)
        step.before_update()
        self._collect()
        step.grads.leftovers.before_update(self._states.ungrouped())
        grad_norm = torch.empty((), dtype=torch.float32, device=self._device)
        with self._updates.room(self._states.trained):
            max_norm, norm_type = self._next.requested or (self._max_norm, 2.0)
            if self._next.summary is not None:  # a learning rate may have been set since
                compare_settings(step, self._settings())
            summary = self._next.summary or self._summarize(norm_type)
            refuse_idle(self._model, summary)
            self._next.reset_clipping()
            self._manager.micro_batches.note_step(summary.num_backwards)
            self.grad_norm = grad_norm.fill_(self._true_norm(summary))
            self._update_all(summary, max_norm)

    def _collect(self) -> None:
        """Complete the gradients, and release payloads that an update would make stale. Collective."""
        for chunk in self._states.trained:
            self._manager.step.before_chunk_update(chunk)
        self._manager.grads.catch_up()

    def _summarize(self, norm_type: float) -> GradientSummary:
        """Find out what all ranks must know of the gradients."""
        trained, ungrouped = self._states.trained, self._states.ungrouped()
        live = self._manager.live if self._model.settings.model_data_memory is None else None
        step, num_parameters = self._manager.step, len(self._manager.parameters)
        return summarize(step, trained, ungrouped, num_parameters, norm_type, self._settings(), live)

    def _update_all(self, summary: GradientSummary, max_norm: float | None) -> None:
        """Do what all ranks have agreed on. Nothing in here may fail on one rank alone."""
        step = self._manager.step
        number = self._next.count_step()
        norm, ungrouped, states = self._true_norm(summary), self._states.ungrouped(), self._states
        updated = {chunk: its for chunk in states.trained if any(its := self._updates.steps(chunk, summary))}
        # A non-finite gradient on any rank skips the step on all ranks, because all have the same summary.
        skipped = None
        factors = GradientFactors(1.0 / self._scaling.value)
        if summary.non_finite is not None:
            skipped = self._manager.parameters[summary.non_finite].name
            warn_at_script(f"step {number} skipped on all ranks: the gradient of {skipped!r} is not finite")
        else:
            if max_norm is not None:
                factors = factors._replace(clip=clip_coefficient(norm, max_norm))
            with step.failures.tearing():
                step.grads.note_end(Becomes.USED, ungrouped)
                self._updates.update(updated, factors)
            states.note_step()
        step.grads.end_step(Becomes.USED, ungrouped)
        self.last = StepReport(number, norm, factors.clip, skipped, self._scaling.value)
        if updated:
            self._scaling.after_step(skipped)

    def _settings(self) -> str:
        return settings_of_step(self._next.requested or self._max_norm, self._scaling.value, self._param_groups)

    def _true_norm(self, summary: GradientSummary) -> float:
        """The norm of the gradients without the loss scale."""
        return summary.norm / self._scaling.value
