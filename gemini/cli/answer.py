"""What `gemini plan` finds out of a model on a cluster: numbers, before they are shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from gemini.cli.cluster import Cluster
from gemini.errors import BudgetError
from gemini.memory.collector import uncollected
from gemini.model.estimate import plan_of
from gemini.model.workload import blocks_of, workload_of
from gemini.placement.budget import MORE_ACTIVATIONS, RESERVE, FreeBytes
from gemini.placement.cost import ModelledStep, modelled_step
from gemini.placement.dtypes import Dtype
from gemini.placement.explain import budgets_in_words
from gemini.placement.moves import Moves, moves_of
from gemini.placement.plan import Plan
from gemini.placement.predict import Predicted, expected_schedule, predict
from gemini.placement.sizes import format_bytes
from gemini.placement.workload import Workload
from gemini.settings import Settings, dtype_of

_MOST_RANKS = 2**16
_TRIES = 3


@dataclass(frozen=True)
class Batch:
    """What each rank computes in a step.

    Args:
        sequences: how many.
        length: tokens of each.
        is_checkpointed: every block keeps its input alone, and is computed again in the backward.
        experts_per_token: that a token is sent to. None: as the model's config says.
    """

    sequences: int
    length: int
    is_checkpointed: bool
    experts_per_token: int | None = None

    @property
    def tokens(self) -> int:
        """Of one rank."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Answer:
    """Bytes and seconds of each rank, or why there are none.

    Args:
        cluster: where.
        batch: of each rank.
        num_parameters: of the whole model; tied ones count once.
        dtype: of most of the weights, and so of products.
        workload: of a token.
        activations: bytes at most, with the batch's checkpointing.
        plan: None: it does not fit.
        refusal: why, if there is no plan.
        predicted: of a step, with the batch's checkpointing. None: no plan.
        knobs: what would make it fit, or what more and less memory would change, in words.
        moves: of a step.
        step: modelled. None: no plan, or no rates.
        notes: what is not known, in words.
    """

    cluster: Cluster
    batch: Batch
    num_parameters: int
    dtype: Dtype
    workload: Workload
    activations: int
    plan: Plan | None
    refusal: BudgetError | None
    predicted: Predicted | None
    knobs: tuple[str, ...]
    moves: Moves | None
    step: ModelledStep | None
    notes: tuple[str, ...]


def answer(module: nn.Module, settings: Settings, cluster: Cluster, batch: Batch) -> Answer:
    """Plan for `module` and model its step. Local; nothing is allocated.

    Raises ValueError for settings that the module contradicts.
    """
    with uncollected():
        return _Question(module, settings, cluster, batch).answer()


class _Question:
    def __init__(self, module: nn.Module, settings: Settings, cluster: Cluster, batch: Batch) -> None:
        if cluster.device_bytes is not None:
            settings = replace(settings, device_memory=cluster.device_bytes)
        if cluster.host_bytes is not None:
            settings = replace(settings, host_memory=cluster.host_bytes)
        self._module, self._settings, self._cluster, self._batch = module, settings, cluster, batch
        self._dtype = _dtype_of(module, settings)
        self._workload = workload_of(module, self._dtype.itemsize, batch.experts_per_token)

    def answer(self) -> Answer:
        activations = self._activations(self._batch)
        notes = list(self._workload.notes)
        plan, refusal, predicted, moves, step = None, None, None, None, None
        try:
            plan = self._plan(self._cluster.ranks.count, activations)
        except BudgetError as error:
            refusal = error
            knobs = [*self._knobs(error)]
        else:
            knobs = [*budgets_in_words(plan.demand, plan.placement, plan.budget, plan.settings.policy)]
            knobs += self._largest_batch(plan)
            names = [*blocks_of(self._module)] if self._batch.is_checkpointed else []
            predicted = predict(plan, schedule=expected_schedule(plan, names))
            moves = moves_of(plan, predicted)
            step = self._step(moves, notes)
            notes.append(
                "Bytes that move are predicted for operators that run in the order in which the model has them."
            )
        return Answer(
            cluster=self._cluster,
            batch=self._batch,
            num_parameters=sum(parameter.numel() for parameter in self._module.parameters()),
            dtype=self._dtype,
            workload=self._workload,
            activations=activations,
            plan=plan,
            refusal=refusal,
            predicted=predicted,
            knobs=tuple(knobs),
            moves=moves,
            step=step,
            notes=tuple(notes),
        )

    def _activations(self, batch: Batch) -> int:
        return self._workload.activation_bytes(batch.tokens, is_checkpointed=batch.is_checkpointed)

    def _plan(self, ranks: int, activations: int) -> Plan:
        """For training. Raises BudgetError also where there is room for the weights alone."""
        free, there = FreeBytes(activations=activations), self._cluster.host_bytes
        plan = None
        try:
            plan = plan_of(self._module, self._settings, ranks, free)
        except BudgetError as error:
            if error.tier != "host":
                raise
        if plan is None or (there is not None and plan.host_bytes > there):  # to say what training takes
            plan = plan_of(self._module, replace(self._settings, host_memory=None), ranks, free)
        needed = plan.host_bytes
        words = f"training needs {needed} bytes ({format_bytes(needed)}) at rest on the host of each rank"
        if self._cluster.is_emulated:
            needed += plan.device_bytes + activations
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

    def _step(self, moves: Moves, notes: list[str]) -> ModelledStep | None:
        rates, batch, work = self._cluster.rates, self._batch, self._workload
        if rates is None:
            notes.append("No step time is modelled: nobody gave rates of this machine (--rates).")
            return None
        again = work.computed_again_flops(batch.tokens, batch.length) if batch.is_checkpointed else 0.0
        try:
            step = modelled_step(
                moves,
                work.forward_flops(batch.tokens, batch.length),
                again,
                self._dtype.name,
                rates,
                self._cluster.ranks,
            )
        except ValueError as error:
            notes.append(f"No step time is modelled: {error}.")
            return None
        if step.unknown:
            notes.append(
                f"Not in the modelled time, because no rate between ranks is known: {', '.join(step.unknown)}."
            )
        if rates.collective_s == 0 and self._cluster.ranks.count > 1:
            notes.append("Launches of collectives are not in the modelled time: these rates have none.")
        return step

    # -- what would help, and what there is room for

    def _knobs(self, error: BudgetError) -> Iterator[str]:
        needed, budget = error.needed_bytes, error.budget_bytes
        if needed is None or budget is None:
            return
        if error.tier == "host":
            where = "Host memory" if self._cluster.is_emulated else f"--host-memory {needed}B"
            more = f"{format_bytes(needed)} for each rank, {format_bytes(needed - budget)} more"
            yield f"{where} ({more}) would be enough."
            yield from self._more_ranks()
            return
        device = self._cluster.device_bytes
        if device is None:
            return
        enough = _device_bytes_for(needed, self._activations(self._batch))
        more = format_bytes(enough - device)
        yield f"--device-memory {enough}B ({format_bytes(enough)}, {more} more on each device) would be enough."
        batch = self._batch
        if not batch.is_checkpointed and self._workload.block_bytes:
            batch = replace(batch, is_checkpointed=True)
            there = device - _device_bytes_for(needed, self._activations(batch))
            does = "would be enough" if there >= 0 else f"would leave {format_bytes(-there)} missing"
            yield (
                f"--activation-checkpointing, with at most {format_bytes(self._activations(batch))} of activations "
                f"instead of {format_bytes(self._activations(self._batch))}, {does}."
            )
        tokens = self._tokens_beside(needed, batch)
        words = " with it" if batch is not self._batch else ""
        if tokens >= batch.length:
            yield f"--batch {tokens // batch.length}{words} would be enough."
        elif tokens > 0:
            yield f"--batch 1 --sequence-length {tokens}{words} would be enough."
        else:
            yield "No smaller batch would be enough: chunks alone need more. Smaller operators would lower that."

    def _more_ranks(self) -> Iterator[str]:
        """The fewest ranks, in doublings, that share what does not fit."""
        count, tries = self._cluster.ranks.count, 0
        per_rank = (self._cluster.device_bytes or 0) + (self._cluster.host_bytes or 0)
        least = sum(p.numel() for p in self._module.parameters()) * self._dtype.itemsize * 4 / max(1, per_rank)
        while count < _MOST_RANKS and tries < _TRIES and self._settings.stage > 0 and not self._cluster.is_emulated:
            count *= 2
            if count < least:  # even weights, gradients and moments have no room
                continue
            tries += 1
            try:
                self._plan(count, self._activations(self._batch))
            except BudgetError:
                continue
            yield f"--ranks {count} with as much memory each would be enough."
            return

    def _tokens_beside(self, model_bytes: int, batch: Batch) -> int:
        """Tokens whose activations fit beside so much model data."""
        device = self._cluster.device_bytes
        of_one = self._workload.activation_bytes(1, is_checkpointed=batch.is_checkpointed)
        if device is None or not of_one:
            return 0
        return int(((1 - RESERVE) * device - model_bytes) / (1 + MORE_ACTIVATIONS) / of_one)

    def _largest_batch(self, plan: Plan) -> Iterator[str]:
        least = plan.packed_minimum_bytes  # of all chunk sizes it would take longer to find than the plan
        if least is None or self._cluster.device_bytes is None:
            return
        most = self._tokens_beside(least, self._batch) // self._batch.length
        if most > self._batch.sequences:
            yield f"Up to --batch {most} has a plan, with {format_bytes(least)} of model data on the device then."


def _device_bytes_for(model_bytes: int, activations: int) -> int:
    """Device memory in which a budget of so much model data is left: see `placement/budget.py`."""
    return math.ceil((model_bytes + activations * (1 + MORE_ACTIVATIONS) + 2) / (1 - RESERVE))


def _dtype_of(module: nn.Module, settings: Settings) -> Dtype:
    """Of most of the elements."""
    counts: Counter[Dtype] = Counter()
    for parameter in module.parameters():
        counts[dtype_of(parameter.dtype)] += parameter.numel()
    own = counts.most_common(1)[0][0] if counts else Dtype("float32", 4)
    given = settings.dtype
    return own if given is None or isinstance(given, dict) else dtype_of(given)  # type: ignore[arg-type]
