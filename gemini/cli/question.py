"""What `gemini plan` is asked: a model on a cluster, with settings and a batch. An answer tries others by `replace`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from gemini.cli.cluster import Cluster
from gemini.errors import BudgetError
from gemini.model.estimate import packed_of
from gemini.placement.budget import ACTIVATION_FRACTION, MORE_ACTIVATIONS, RESERVE, FreeBytes
from gemini.placement.demand import OPTIM_STATES
from gemini.placement.dtypes import Dtype
from gemini.placement.inference import plan_training
from gemini.placement.packed import Packed
from gemini.placement.plan import Plan
from gemini.placement.policy import PlacementPolicy
from gemini.placement.sizes import format_bytes
from gemini.placement.workload import Workload
from gemini.settings import Settings


@dataclass(frozen=True)
class Batch:
    """What each rank computes in a step.

    Args:
        sequences: of a micro-batch.
        length: tokens of each.
        is_checkpointed: every block keeps its input alone, and is computed again in the backward.
        experts_per_token: that a token is sent to. None: as the model's config says.
        micro_batches: of a step.
    """

    sequences: int
    length: int
    is_checkpointed: bool
    experts_per_token: int | None = None
    micro_batches: int = 1

    @property
    def tokens(self) -> int:
        """The tokens in a micro-batch of one rank."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Question:
    """All that an answer follows from.

    Args:
        module: the model, on any device.
        settings: without budgets: the cluster has them.
        cluster: where.
        batch: of each rank.
        dtype: of most of the weights.
        workload: of a token.
        gradient_bytes: that autograd holds of gradients before their chunks take them.
        optim_states: states per element that the optimizer keeps.
        packed: the packings of `module` for these settings and ranks, which all tries of other budgets, policies and
            batches share.
    """

    module: nn.Module
    settings: Settings
    cluster: Cluster
    batch: Batch
    dtype: Dtype
    workload: Workload
    gradient_bytes: int
    packed: Packed
    optim_states: int = OPTIM_STATES

    @property
    def activations(self) -> int | None:
        """Bytes that a step takes besides model data, at most. None: the formulas do not cover the model."""
        work, batch = self.workload, self.batch
        if not work.covers_activations:
            return None
        kept = work.activation_bytes(batch.tokens, is_checkpointed=batch.is_checkpointed)
        return kept + self.gradient_bytes

    def plan(self) -> Plan:
        """The plan for training. Local. Raises BudgetError also where there is room for the weights alone."""
        # The bound of activations counts like a peak that a step has measured: chunks get all that it leaves, less the
        # margins of `Budget.of`. Where there is no bound, ACTIVATION_FRACTION of the device is left to activations.
        there, free, plan = self.cluster.host_bytes, FreeBytes(activations=self.activations), None
        try:
            plan = plan_training(self.packed, self._settings_with(there), free, self.optim_states)
        except BudgetError as error:
            if error.tier != "host":
                raise
        # In both cases the host is too small, for the weights or for training. The plan without a bound on the host
        # shows how much training takes there, which the refusal below names.
        if plan is None or (there is not None and plan.host_bytes > there):
            plan = plan_training(self.packed, self._settings_with(None), free, self.optim_states)
        # `predicted` simulates a step. Without a bound on the host there is nothing to compare its peak with.
        needed = plan.host_bytes if there is None else plan.predicted.host_peak
        words = f"training needs {needed} bytes ({format_bytes(needed)}) on the host of each rank"
        if needed > plan.host_bytes:
            words += f", {needed - plan.host_bytes} of them for gradients that find no gradient slot in a step"
        if self.cluster.is_emulated:
            needed += plan.device_bytes + (self.activations or 0)
            words = (
                f"training needs {needed} bytes ({format_bytes(needed)}) of each rank with its activations, all in "
                "host memory, since this machine has no accelerator"
            )
        if there is not None and needed > there:
            raise BudgetError(
                f"host: {words}, and there are {there} ({format_bytes(there)})",
                tier="host",
                needed_bytes=needed,
                budget_bytes=there,
            )
        return plan

    def refusal(self) -> BudgetError | None:
        """Why there is no plan. None: there is one."""
        try:
            self.plan()
        except BudgetError as error:
            return error
        return None

    def refusal_at_first(self) -> BudgetError | None:
        """Why `ShardedModel` refuses training where it is told `device_memory` alone, before a step has run."""
        # With formulas that do not cover the model, activations are as unknown as before a step.
        without = replace(self.workload, covers_activations=False)
        return replace(self, workload=without).refusal()

    def device_bytes_for(self, model_bytes: int) -> int:
        """Device memory in which a budget of so much model data is left: see `placement/budget.py`."""
        # Two bytes more cover the rounding to whole bytes in `Budget.of`.
        activations = self.activations
        if activations is None:
            return math.ceil((model_bytes + 2) / (1 - ACTIVATION_FRACTION))
        return math.ceil((model_bytes + activations * (1 + MORE_ACTIVATIONS) + 2) / (1 - RESERVE))

    def tokens_beside(self, model_bytes: int) -> int | None:
        """Tokens whose activations fit beside so much model data. None: nobody knows, or there is no bound."""
        device = self.cluster.device_bytes
        of_one = self.workload.activation_bytes(1, is_checkpointed=self.batch.is_checkpointed)
        # Where the formulas count no bytes for a token, the division below would be by zero.
        if device is None or not of_one or self.activations is None:
            return None
        # This is `device_bytes_for` solved for tokens. Gradients in autograd's hands do not grow with the batch.
        free_bytes = ((1 - RESERVE) * device - model_bytes) / (1 + MORE_ACTIVATIONS) - self.gradient_bytes
        return math.floor(free_bytes / of_one)

    def with_sequences(self, sequences: int) -> Question:
        """The same question for another number of sequences in a micro-batch."""
        return replace(self, batch=replace(self.batch, sequences=sequences))

    def with_memory(self, device_bytes: int | None, host_bytes: int | None) -> Question:
        """The same question for ranks with other memory."""
        return replace(self, cluster=replace(self.cluster, device_bytes=device_bytes, host_bytes=host_bytes))

    def with_ranks(self, count: int) -> Question:
        """The same question for `count` ranks, each with as much memory as now."""
        ranks = replace(self.cluster.ranks, count=count)
        # Shards, and so packings, depend on the number of ranks.
        packed = packed_of(self.module, self.settings, count)
        return replace(self, cluster=replace(self.cluster, ranks=ranks), packed=packed)

    def with_policy(self, policy: str | PlacementPolicy) -> Question:
        """The same question under another policy, which packings do not depend on."""
        return replace(self, settings=self.settings.with_policy(policy))

    def _settings_with(self, host_bytes: int | None) -> Settings:
        return replace(self.settings, device_memory=self.cluster.device_bytes, host_memory=host_bytes)
