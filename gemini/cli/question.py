"""What `gemini plan` is asked: a cluster, a model, and which knobs may be turned."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import typer
from torch import nn

from gemini.errors import BudgetError
from gemini.model.estimate import packed_of, states_per_element
from gemini.monitor.live import MemoryMonitor
from gemini.monitor.rates import disk_rates, rates_of
from gemini.monitor.readings import HOST_RESERVE
from gemini.placement.budget import LESS_FOR_ACTIVATIONS, MORE_ACTIVATIONS, RESERVE, FreeBytes
from gemini.placement.cost import Ranks
from gemini.placement.demand import (
    OPTIM_STATES,
    Dtype,
    WeightSpec,
    Workload,
    in_units,
    parse_bytes,
)
from gemini.placement.machines import MACHINES, THIS, Machine, Rates
from gemini.placement.needs import Packed
from gemini.placement.optimizers import OptimizerKind, states_in_all
from gemini.placement.plan import Plan
from gemini.placement.policy import PlacementPolicy
from gemini.placement.search import plan_training
from gemini.settings import Settings

# -- What a plan is for: this machine, or a cluster that is described on the command line.


A_FOLDER = "FOLDER"
"""Stands for a disk of another machine."""
_PER_NODE = 8  # at most, of a cluster that is described by its memory alone


@dataclass(frozen=True)
class Cluster:
    """Ranks and what each of them has.

    Args:
        name: in words.
        ranks: how many, and where.
        device_bytes: of the device, activations included. None: no bound.
        host_bytes: of host memory. None: no bound was given.
        is_emulated: the device is host memory too.
        rates: None: nothing is known of them.
        disk_bytes: of a local disk. None: no bound was given, if there is a disk.
    """

    name: str
    ranks: Ranks
    device_bytes: int | None
    host_bytes: int | None
    is_emulated: bool
    rates: Rates | None
    disk_bytes: int | None = None


def described(
    ranks: int | None,
    ranks_per_node: int | None,
    machine: str,
    device_memory: str | None,
    host_memory: str | None,
    rates: str | None,
    disk_path: str | None = None,
    disk_memory: str | None = None,
) -> Cluster:
    """The cluster that the options describe. Local; reads this machine's memory and rates if they are asked for.

    Raises typer.BadParameter.
    """
    if machine != THIS and machine not in MACHINES:
        raise typer.BadParameter(
            f"must be {THIS!r} or one of {', '.join(MACHINES)}, found {machine!r}", param_hint="--machine"
        )
    published = MACHINES.get(machine)
    device_bytes, host_bytes = _bytes(device_memory, "--device-memory"), _bytes(host_memory, "--host-memory")
    # Whoever names a device's memory describes another machine than this one.
    is_here = published is None and device_bytes is None
    # Without `--ranks` this machine has a rank for each accelerator, at least one. A named machine is one full
    # node, and a device whose memory is described is one.
    count = ranks or (
        max(1, torch.accelerator.device_count()) if is_here else published.ranks_per_node if published else 1
    )
    is_whole = published is not None and published.ranks_per_node > 1
    whole = published.ranks_per_node if published is not None and is_whole else _filled_by(count)
    per_node = ranks_per_node or (count if is_here else whole)
    try:
        layout = Ranks(count, per_node)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or another --ranks-per-node", param_hint="--ranks") from None
    # Without an accelerator `ShardedModel` emulates the device in host memory, and `Question.plan` adds up both tiers.
    is_emulated = is_here and not torch.accelerator.is_available()
    if published is not None:
        device_bytes = published.device_bytes if device_bytes is None else device_bytes
        # A machine of one device stands for as many as share a node, each with its part of the host.
        times = 1 if is_whole else layout.on_a_node
        host_bytes = _share(published.host_bytes * times, layout) if host_bytes is None else host_bytes
    elif is_here:
        # What other processes hold is not available to a training either, so free memory counts, not capacity. A
        # cluster of which only device memory was told gets no bound on its host, and the answer says so.
        reading = MemoryMonitor().read()
        device_bytes = reading.device.available_bytes
        host_bytes = _share(reading.host.available_bytes, layout) if host_bytes is None else host_bytes
    if published is not None:
        name = published.name
    else:
        name = "this machine" if is_here else "as described"
    # Measuring takes a second, so whatever else may be refused was refused before.
    found, disk_bytes = _rates(rates, published, is_here), _bytes(disk_memory, "--disk-memory")
    if disk_path is not None:
        # Whoever names a folder has it here. Other ranks of this node share the disk.
        try:
            read, write = disk_rates(Path(disk_path))
            free = psutil.disk_usage(disk_path).free
        except (ValueError, BudgetError) as error:
            raise typer.BadParameter(str(error), param_hint="--disk-path") from None
        disk_bytes = free // layout.on_a_node if disk_bytes is None else disk_bytes
        if found is not None:
            found = replace(found, disk_read_bytes_per_s=read, disk_write_bytes_per_s=write)
    return Cluster(name, layout, device_bytes, host_bytes, is_emulated, found, disk_bytes)


def _filled_by(count: int) -> int:
    """Ranks on each node, as many as may be: nobody said how large the nodes are that `count` ranks fill."""
    return next(per_node for per_node in range(_PER_NODE, 0, -1) if count % per_node == 0)


def _share(host_bytes: int, ranks: Ranks) -> int:
    """One rank's part of a node's host memory, less what is left to the rest of the machine."""
    # `share_of_host` of the monitor divides by LOCAL_WORLD_SIZE, which no launcher has set for this command.
    return int(host_bytes * (1 - HOST_RESERVE)) // ranks.on_a_node


def _bytes(value: str | None, option: str) -> int | None:
    try:
        return parse_bytes(value, option)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _rates(wanted: str | None, published: Machine | None, is_here: bool) -> Rates | None:
    """Measured or published rates. None for a machine of which only the memory is told, unless `wanted` names some."""
    if wanted is None:
        wanted = published.name if published else "measured" if is_here else "none"
    if wanted == "none":
        return None
    if wanted == "measured":
        # Here is no process group, so the rates between ranks stay unknown, and the answer names the parts without one.
        return rates_of()
    if wanted in MACHINES:
        return MACHINES[wanted].rates
    if not wanted.endswith(".json"):
        raise typer.BadParameter(
            f"must be measured, none, one of {', '.join(MACHINES)}, or a .json file, found {wanted!r}",
            param_hint="--rates",
        )
    try:
        return Rates.from_json(json.loads(Path(wanted).read_text()))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{wanted}: {error}", param_hint="--rates") from None


SMALL_MOMENTS = "8bit"
"""The name of an optimizer, for `--optimizer` and as `state_dtype` of a `HybridAdam`."""

# -- What `gemini plan` is asked: a model on a cluster, with settings and a batch. An answer tries others by `replace`.


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
        optim_states: states per element that the optimizer keeps, or the optimizer.
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
    optim_states: float | OptimizerKind = OPTIM_STATES

    @property
    def activations(self) -> int | None:
        """Bytes that a step takes besides model data, at most. None: the formulas do not cover the model."""
        work, batch = self.workload, self.batch
        if not work.covers_activations:
            return None
        kept = work.activation_bytes(batch.tokens, is_checkpointed=batch.is_checkpointed)
        return kept + self.gradient_bytes

    def plan(self, is_try: bool = False) -> Plan:
        """The plan for training. Local. Raises BudgetError also where there is room for the weights alone.

        is_try: see `plan_packed`.
        """
        # The bound of activations counts like a peak that a step has measured: chunks get all that it leaves, less the
        # margins of `Budget.of`. Where there is no bound, a fixed part of the device is left to activations.
        there, free, plan = self.cluster.host_bytes, FreeBytes(activations=self.activations), None
        try:
            # Where it is plain that there is no such plan, every chunk size would be tried in vain: for seconds.
            if not self._is_short_in_all():
                plan = plan_training(self.packed, self._settings_with(there), free, self.optim_states, is_try)
        except BudgetError as error:
            if error.tier != "host":
                raise
        # In both cases the host is too small, for the weights or for training. The plan without a bound on the host
        # shows how much training takes there, which the refusal below names.
        if plan is None or (there is not None and plan.host_bytes > there):
            plan = plan_training(self.packed, self._settings_with(None), free, self.optim_states, is_try)
        # `predicted` simulates a step. Without a bound on the host there is nothing to compare its peak with.
        needed = plan.host_bytes if there is None else plan.predicted.host_peak
        words = f"training needs {needed} bytes{in_units(needed)} on the host of each rank"
        if needed > plan.host_bytes:
            words += f", {needed - plan.host_bytes} of them for gradients that find no gradient slot in a step"
        if self.cluster.is_emulated:
            needed += plan.device_bytes + (self.activations or 0)
            words = (
                f"training needs {needed} bytes{in_units(needed)} of each rank with its activations, all in "
                "host memory, since this machine has no accelerator"
            )
        if there is not None and needed > there:
            raise BudgetError(
                f"host: {words}, and there are {there}{in_units(there)}",
                tier="host",
                needed_bytes=needed,
                budget_bytes=there,
            )
        return plan

    def refusal(self) -> BudgetError | None:
        """Why there is no plan. None: there is one."""
        try:
            self.plan(is_try=True)
        except BudgetError as error:
            return error
        return None

    def least_bytes_at_rest(self) -> int:
        """What all ranks hold together of weights, gradients and optimizer state, at least.

        That is without masters and padding, and never too much: of ranks that hold less none are tried.
        """
        weights = self.packed.spec.weights
        trained = [weight for weight in weights if weight.trainable]
        # States have fp32 where weights have 16 bits: see `_chunk_demand` in gemini/placement/needs.py.
        states = states_in_all(self.optim_states, trained)
        return sum(map(bytes_of, weights)) + sum(map(bytes_of, trained)) + states

    def _is_short_in_all(self) -> bool:
        """Whether devices and hosts together are too small for what rests there, wherever it rests."""
        device, host = self.cluster.device_bytes, self.cluster.host_bytes
        if device is None or host is None or self.settings.disk_path is not None or self.settings.update_in_backward:
            return False
        of_a_rank = max(0, device - (self.activations or 0)) + host
        return self.least_bytes_at_rest() > of_a_rank * self.cluster.ranks.count

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
            return math.ceil((model_bytes + 2) / (1 - LESS_FOR_ACTIVATIONS[-1]))
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

    def with_checkpointing(self) -> Question:
        """The same question with activation checkpointing."""
        return replace(self, batch=replace(self.batch, is_checkpointed=True))

    def with_small_moments(self) -> Question:
        """The same question with Adam's moments of 8 bits."""
        return replace(self, optim_states=states_per_element(self.module, SMALL_MOMENTS))

    def with_disk(self) -> Question:
        """The same question with a local disk that has room for everything."""
        settings = replace(self.settings, disk_path=A_FOLDER)
        return replace(self, settings=settings, cluster=replace(self.cluster, disk_bytes=None))

    def with_ranks(self, count: int) -> Question:
        """The same question for `count` ranks, each with as much memory as now."""
        ranks = replace(self.cluster.ranks, count=count)
        # Shards, and so packings, depend on the number of ranks.
        size = self.settings.shard_group_size
        # Groups that do not fill so many ranks are given up: all of them are one group then.
        settings = self.settings if size is None or count % size == 0 else replace(self.settings, shard_group_size=None)
        packed = packed_of(self.module, settings, count)
        return replace(self, settings=settings, cluster=replace(self.cluster, ranks=ranks), packed=packed)

    def with_policy(self, policy: str | PlacementPolicy) -> Question:
        """The same question under another policy, which packings do not depend on."""
        return replace(self, settings=self.settings.with_policy(policy))

    def _settings_with(self, host_bytes: int | None) -> Settings:
        disk_bytes = None if self.settings.disk_path is None else self.cluster.disk_bytes
        device_bytes = self.cluster.device_bytes
        return replace(self.settings, device_memory=device_bytes, host_memory=host_bytes, disk_memory=disk_bytes)


def bytes_of(weight: WeightSpec) -> int:
    """Of the whole weight."""
    return weight.numel * weight.dtype.itemsize
