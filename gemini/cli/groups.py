"""How `gemini plan` divides the ranks of several nodes into groups: each way is planned and modelled, one is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from gemini.cli.question import Question
from gemini.errors import BudgetError
from gemini.model.workload import blocks_of
from gemini.placement.cost import ModelledStep, MovedBytes, Ranks, modelled_step, moves_of
from gemini.placement.plan import Plan
from gemini.placement.predict import Predicted, expected_schedule, predict
from gemini.settings import Settings


def predicted_of(question: Question, plan: Plan) -> Predicted:
    """The step that repeats: checkpointed blocks are computed again in the backward, and fetched for it."""
    names = [*blocks_of(question.module)] if question.batch.is_checkpointed else []
    return predict(plan, schedule=expected_schedule(plan, names))


def step_of(question: Question, moves: MovedBytes) -> ModelledStep | None:
    """The modelled step. None: there are no rates. Raises ValueError if they have none for the dtype."""
    rates, batch, work = question.cluster.rates, question.batch, question.workload
    if rates is None:
        return None
    # FLOPs of one rank in a whole step. Activation checkpointing runs only the blocks' forwards again.
    forward = batch.micro_batches * work.forward_flops(batch.tokens, batch.length)
    again = batch.micro_batches * work.computed_again_flops(batch.tokens, batch.length)
    # Activations that all micro-batches keep without checkpointing, if the formulas cover the model.
    kept = work.activation_bytes(batch.tokens, is_checkpointed=False) if work.covers_activations else 0
    return modelled_step(
        moves,
        forward,
        again if batch.is_checkpointed else 0.0,
        question.dtype.name,
        rates,
        question.cluster.ranks,
        kept_bytes=batch.micro_batches * kept,
        defers=question.settings.deferred_update is not False and not question.cluster.is_emulated,
    )


@dataclass(frozen=True)
class _Way:
    """One way to divide the ranks, as modelled."""

    words: str
    question: Question
    step: ModelledStep | None  # None: it does not fit

    def __str__(self) -> str:
        if self.step is None:
            return f"{self.words}: does not fit"
        among = sum(self.step.parts.get(part) or 0.0 for part in ("gathers", "exchanges"))
        least, most = self.step.least_seconds, self.step.seconds
        return f"{self.words}: {least:.3g} s if all overlaps, {most:.3g} s if nothing does, {among:.3g} s among ranks"


def choose(ask: Callable[[Settings], Question], settings: Settings, ranks: Ranks) -> tuple[Question, str | None]:
    """The question with the groups whose modelled step is shortest, and why; None: there was nothing to choose.

    settings: they name no groups. On one node, or without rates, all ranks that share shards are one group.
    """
    first = ask(settings)
    if ranks.num_nodes == 1 or settings.stage == 0 or first.cluster.rates is None:
        return first, None
    if first.cluster.rates.network_bytes_per_s is None:
        # What goes between nodes would count as nothing, and the way that sends most there would win.
        return first, (
            "Groups were not compared: no rate between nodes is known. Give one as network_bytes_per_s in a file for "
            "--rates, or name the groups, as --shard-group-size "
            f"{ranks.on_a_node} does."
        )
    ways = [_modelled("all ranks as one group", first)]
    ways += [_modelled(words, ask(other)) for words, other in _others(settings, ranks)]
    fitting = [way for way in ways if way.step is not None]
    if not fitting:
        return first, None
    best = min(fitting, key=_middle)  # of equal times the first, which takes least memory
    others = "; ".join(str(way) for way in ways if way is not best)
    return best.question, f"Groups chosen by modelled time: {best}. Not chosen: {others}."


def _middle(way: _Way) -> float:
    """Seconds between the two bounds of a step: neither is reached, and what ranks exchange lies between them."""
    return 0.0 if way.step is None else (way.step.least_seconds + way.step.seconds) / 2


def _others(settings: Settings, ranks: Ranks) -> Iterator[tuple[str, Settings]]:
    size, count = ranks.on_a_node, ranks.count
    if size > 1:
        words = f"{count // size} replicas of {size} shards, one on each node (--shard-group-size {size})"
        yield words, replace(settings, shard_group_size=size).over(count)
    if size > 1 and settings.stage == 3:
        words = f"the same, with states over all ranks (--shard-group-size {size} --optimizer-shard all)"
        other = None
        with suppress(ValueError):  # the settings have what cannot go with it
            other = replace(settings, shard_group_size=size, optimizer_shard="all").over(count)
        if other is not None:
            yield words, other
    if size > 1 and settings.stage == 3:
        words = f"one group with a second copy of the weights on each node (--secondary-group-size {size})"
        yield words, replace(settings, secondary_group_size=size).over(count)


def _modelled(words: str, question: Question) -> _Way:
    try:
        plan = question.plan(is_try=True)
        step = step_of(question, moves_of(plan, predicted_of(question, plan)))
    except (BudgetError, ValueError):  # rates without the dtype model no step
        step = None
    return _Way(words, question, step)
