"""What `gemini plan` advises: each change is tried by planning with it, so that who takes the advice has a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gemini.cli.question import Question
from gemini.errors import BudgetError
from gemini.placement.plan import Plan
from gemini.placement.sizes import format_bytes
from gemini.placement.specs import ModelSpec, OperatorSpec, WeightSpec

_MOST_RANKS = 2**16
# Each try makes a plan, which takes seconds for a large model.
_TRIES = 3
_DIMENSIONS_OF_EXPERTS = 3  # of their weights in one parameter
_LEAST_PART = 4
"""Of a sequence that was asked for: to train on a shorter one is another training."""
_WHOLE = 0.9
"""Of what the device needs: where twice as many ranks need more than this, it is slots, which ranks do not share."""


def that_would_be_enough(question: Question, error: BudgetError) -> Iterator[str]:
    """Changes of `question`, which was refused with `error`, one at a time, in words."""
    needed, budget = error.needed_bytes, error.budget_bytes
    if needed is None or budget is None:
        return
    yield from _policy(question)
    too_large = _too_large(question, error, budget)
    if too_large:  # ranks share no slot
        yield from _smaller_operator(too_large, question.packed.spec, budget)
    else:
        yield from _more_ranks(question, error)
    if error.tier == "host":
        yield from _more_host_memory(question, needed, budget)
    elif question.cluster.device_bytes is not None:
        yield from _more_device_memory(question, needed, question.cluster.device_bytes)
        yield from _fewer_activations(question, needed, question.cluster.device_bytes)


def larger_batch(question: Question, plan: Plan) -> Iterator[str]:
    """The largest batch that the chunks of `plan` leave room for; where the host is short, some that is larger."""
    least = plan.packed_minimum_bytes  # of all chunk sizes it would take longer to find than the plan
    tokens = None if least is None else question.tokens_beside(least)
    if least is None or tokens is None:
        return
    fits, max_sequences = question.batch.sequences, tokens // question.batch.length
    # The device has room for the first number of sequences if the chunks hold their least there. Every further try is
    # the middle between the last one and the batch that fits.
    for _ in range(2 * _TRIES):
        if max_sequences <= fits:
            return
        if question.with_sequences(max_sequences).refusal() is None:
            yield f"--batch {max_sequences} has a plan, too."
            return
        max_sequences = (fits + max_sequences) // 2  # states that would leave the device have no room on the host


def _policy(question: Question) -> Iterator[str]:
    if question.settings.policy.name == "auto":
        return
    if question.with_policy("auto").refusal() is None:
        yield "--policy auto would be enough."


def _too_large(question: Question, error: BudgetError, budget: int) -> list[OperatorSpec]:
    """The operators that no packing gives room to, however many ranks there are."""
    if error.tier != "device" or question.settings.stage < 3 or question.cluster.ranks.count == 1:
        return []  # weights that are whole at home need no slots
    spec = question.packed.spec
    return [operator for operator in spec.operators if _least_bytes(operator, spec) > budget]


def _least_bytes(operator: OperatorSpec, spec: ModelSpec) -> int:
    """What an operator in use takes on the device: its weights' slots and a gradient slot for the largest."""
    weights = [spec.weights[place] for place in operator.weights]
    gradient = max((_bytes_of(weight) for weight in weights if weight.trainable), default=0)
    return sum(map(_bytes_of, weights)) + gradient


def _smaller_operator(operators: list[OperatorSpec], spec: ModelSpec, budget: int) -> Iterator[str]:
    """Name the operator if it, or several that are alike, are all that does not fit."""
    shapes = {tuple(spec.weights[place].shape for place in operator.weights) for operator in operators}
    # Where operators of several shapes are too large, a smaller one of a single shape would not be enough.
    if len(shapes) != 1 or not budget:  # activations have taken the room
        return
    operator = operators[0]
    weight = max((spec.weights[place] for place in operator.weights), key=_bytes_of)
    is_of_experts = len(weight.shape) == _DIMENSIONS_OF_EXPERTS and "expert" in weight.name
    smaller = "experts in modules of their own, or a smaller operator," if is_of_experts else "a smaller operator"
    yield (
        f"{operator.name or 'The model'} alone needs more than the budget: its largest weight, "
        f"{weight.name.removeprefix(f'{operator.name}.')}, has {_bytes_of(weight)} bytes "
        f"({format_bytes(_bytes_of(weight))}), and slots and gradient slot each hold it whole; "
        f"{smaller} would need less."
    )


def _bytes_of(weight: WeightSpec) -> int:
    return weight.numel * weight.dtype.itemsize


def _more_ranks(question: Question, error: BudgetError) -> Iterator[str]:
    """The fewest ranks, in doublings, that share what does not fit."""
    cluster, tries = question.cluster, 0
    # At stage 0 ranks share nothing, and ranks on this machine share one host memory, which does not grow with them.
    if question.settings.stage == 0 or cluster.is_emulated:
        return
    needed, count, per_rank = (
        error.needed_bytes or 0,
        cluster.ranks.count,
        (cluster.device_bytes or 0) + (cluster.host_bytes or 0),
    )
    # Tries are few, so those are saved that must fail: ranks whose whole memory is less than what rests there.
    least = 0.0 if cluster.host_bytes is None else _least_bytes_at_rest(question) / max(1, per_rank)
    while count < _MOST_RANKS and tries < _TRIES:
        count *= 2
        if count < least:
            continue
        # The command refuses ranks that leave places of a node empty.
        if not cluster.ranks.fill_nodes(count):
            continue
        tries += 1
        refused = question.with_ranks(count).refusal()
        if refused is None:
            yield f"--ranks {count} with as much memory each would be enough."
            return
        if refused.tier == "device" and (refused.needed_bytes or 0) > _WHOLE * needed:
            return
        needed = refused.needed_bytes or 0


def _least_bytes_at_rest(question: Question) -> int:
    """What all ranks hold together of weights, gradients and optimizer state, at least: without masters and padding."""
    # This must never be too much: ranks that would be enough would not be tried, and more of them be advised.
    weights = question.packed.spec.weights
    trained = [weight for weight in weights if weight.trainable]
    # States have fp32 where weights have 16 bits: see `_chunk_demand` in gemini/placement/needs.py.
    states = sum(question.optim_states * weight.numel * max(4, weight.dtype.itemsize) for weight in trained)
    return sum(map(_bytes_of, weights)) + sum(map(_bytes_of, trained)) + states


def _more_host_memory(question: Question, needed: int, budget: int) -> Iterator[str]:
    more = f"{format_bytes(needed)} for each rank, {format_bytes(needed - budget)} more"
    if question.cluster.is_emulated:
        yield f"Host memory ({more}) would be enough."
    else:  # that the plan which asks for it has a place there needs no try
        yield f"--host-memory {needed}B ({more}) would be enough."


def _more_device_memory(question: Question, needed: int, device: int) -> Iterator[str]:
    """Advise what the chunks need on the device, together with what the host then lacks."""
    enough, host = question.device_bytes_for(needed), question.cluster.host_bytes
    more = f"{format_bytes(enough)}, {format_bytes(enough - device)} more on each device"
    more = f"--device-memory {enough}B ({more})"
    try:
        # The host has no bound here, so that the plan shows how much it would have to hold.
        plan = question.with_memory(enough, None).plan()
    except BudgetError:
        return
    on_host = plan.predicted.host_peak
    if host is None or on_host <= host:
        yield f"{more} would be enough."
    else:  # of two figures that are short neither is enough alone
        yield f"{more} and --host-memory {on_host}B together would be enough."


def _fewer_activations(question: Question, needed: int, device: int) -> Iterator[str]:
    words, activations = "", question.activations
    if activations is None:
        return
    # A model without a list of blocks has nothing that checkpointing could compute again.
    if not question.batch.is_checkpointed and question.workload.block_bytes:
        checkpointed = replace(question, batch=replace(question.batch, is_checkpointed=True))
        fewer = checkpointed.activations or 0
        # `needed` is model data alone. `there` is what the device has left beside it and activations, or lacks below 0.
        there = device - checkpointed.device_bytes_for(needed)
        if there >= 0:
            does = "would be enough" if checkpointed.refusal() is None else "would leave too little on the host"
        else:
            does = f"would leave {format_bytes(-there)} missing"
        yield (
            f"--activation-checkpointing, with at most {format_bytes(fewer)} of activations instead of "
            f"{format_bytes(activations)}, {does}."
        )
        # What follows advises smaller batches together with checkpointing, as the words "with it" tell.
        question, words = checkpointed, " with it"
    tokens, length = question.tokens_beside(needed), question.batch.length
    if tokens is None:
        return
    if tokens <= 0:
        yield "No smaller batch would be enough: chunks alone need more."
        return
    if tokens * _LEAST_PART < length:
        return
    # Whole sequences where one fits, else one shorter sequence.
    batch = replace(question.batch, sequences=max(1, tokens // length), length=min(length, tokens))
    if replace(question, batch=batch).refusal() is not None:
        return  # the host is short, too
    if tokens >= length:
        yield f"Batches of up to {batch.sequences} sequences fit{words}: --batch {batch.sequences}."
    else:
        yield f"One sequence of up to {tokens} tokens fits{words}: --batch 1 --sequence-length {tokens}."
