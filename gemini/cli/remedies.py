"""What `gemini plan` advises: what is in the way, and changes that fit, each tried by planning with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gemini.cli.amounts import as_option, in_words
from gemini.cli.question import SMALL_MOMENTS, Question, bytes_of
from gemini.errors import BudgetError
from gemini.placement.budget import RESERVE
from gemini.placement.demand import OPTIM_STATES, ModelSpec, OperatorSpec, parse_bytes
from gemini.placement.plan import Plan

_MOST_RANKS = 2**16
# Each try makes a plan, which takes seconds for a large model.
_TRIES = 3
_DIMENSIONS_OF_EXPERTS = 3  # of their weights in one parameter
_LEAST_PART = 4
"""Of a sequence that was asked for: to train on a shorter one is another training."""
_WHOLE = 0.9
"""Of what the device needs: where twice as many ranks need more than this, it is slots, which ranks do not share."""

Options = tuple[tuple[str, str | None], ...]
"""Names and values on the command line. None: a flag, which has no value."""

_CHECKPOINTING, _BATCH, _LENGTH = "--activation-checkpointing", "--batch", "--sequence-length"
_HOST, _DISK, _DEVICE, _RANKS, _POLICY = "--host-memory", "--disk-memory", "--device-memory", "--ranks", "--policy"
_OPTIMIZER = "--optimizer"
# What a user gives up for it: nothing, a third of the compute, a larger micro-batch, exact moments, money. Sums order
# combinations.
_PRICE = {
    _POLICY: 0,
    _CHECKPOINTING: 1,
    _BATCH: 2,
    _LENGTH: 3,
    _OPTIMIZER: 4,
    _HOST: 5,
    _DISK: 6,
    _RANKS: 20,
    _DEVICE: 30,
}


@dataclass(frozen=True)
class Remedy:
    """A change with which the model fits.

    Args:
        options: in place of those that were given, or beside them. Empty: no option says it.
        words: what it does.
    """

    options: Options
    words: str

    def __str__(self) -> str:
        return f"{' '.join(_flat(self.options))}: {self.words}" if self.options else self.words

    @property
    def price(self) -> int:
        """By which the cheapest comes first."""
        return sum(_PRICE[name] for name, _ in self.options) if self.options else max(_PRICE.values())


def command_of(model: str, given: Options, changes: Options = ()) -> str:
    """The command that was typed, with changes, to paste into a shell."""
    return shlex.join(["gemini", "plan", model, *_flat(tuple((dict(given) | dict(changes)).items()))])


def _flat(options: Options) -> Iterator[str]:
    for name, value in options:
        yield name
        if value is not None:
            yield value


def in_the_way(question: Question, error: BudgetError, remedies: Sequence[Remedy]) -> str:
    """What does not fit, in one sentence of what a user knows: activations, states, the device, the host."""
    needed, budget, device = error.needed_bytes, error.budget_bytes, question.cluster.device_bytes
    if needed is None or budget is None:
        return str(error)
    if error.tier != "device" or device is None:
        where = f"the {error.tier} of each rank"
        words = (
            f"{in_words(needed)} of states and gradients on {where} are what is in the way: it has {in_words(budget)}"
        )
        return words if not question.cluster.is_emulated else f"{words} for these and for activations"
    activations = question.activations
    if not activations or needed > (1 - RESERVE) * device:
        at_least = (
            f"{in_words(needed)} of weights and gradients that the device must hold at once are what is in the way"
        )
        beside = f", beside {in_words(activations)} of activations" if activations else ""
        return f"{at_least}: it has {in_words(device)}{beside}"
    batch = question.batch
    words = (
        f"activations of {in_words(activations)} for {batch.sequences:,} × {batch.length:,} tokens are what is in the "
        f"way: the device has {in_words(device)}"
    )
    # Without activations the host may be short as well: then no remedy for them is one alone.
    checkpointed = [dict(each.options) for each in remedies if _CHECKPOINTING in dict(each.options)]
    on_host = [each[_HOST] for each in checkpointed if _HOST in each]
    if on_host and all(_HOST in each or _DISK in each for each in checkpointed):
        host = question.cluster.host_bytes or 0
        taken = parse_bytes(on_host[0], _HOST) or 0
        states = f"it has {in_words(host)}, and states take {in_words(taken)} of it"
        words += f". With checkpointing the host is short, too: {states}"
    return words


def remedies_of(question: Question, error: BudgetError) -> list[Remedy]:
    """What would make `question` fit, which was refused with `error`, the cheapest first."""
    needed, budget = error.needed_bytes, error.budget_bytes
    if needed is None or budget is None:
        return []
    found = [*_policy(question), *_combined(question, error)]
    too_large = _too_large(question, error, budget)
    if too_large:  # ranks share no slot
        found += _smaller_operator(too_large, question.packed.spec, budget)
    # Ranks do not share the activations of one of them.
    elif error.tier != "device" or needed > budget > 0:
        found += _more_ranks(question, error)
    if error.tier == "device" and question.cluster.device_bytes is not None:
        found += _more_device_memory(question, needed, question.cluster.device_bytes)
    return sorted(found, key=lambda remedy: remedy.price)


def larger_batch(question: Question, plan: Plan) -> Remedy | None:
    """The largest batch that the chunks of `plan` leave room for; where the host is short, some that is larger."""
    least = plan.packed_minimum_bytes  # of all chunk sizes it would take longer to find than the plan
    tokens = None if least is None else question.tokens_beside(least)
    if least is None or tokens is None:
        return None
    fits, max_sequences = question.batch.sequences, tokens // question.batch.length
    # The device has room for the first number of sequences if the chunks hold their least there. Every further try is
    # the middle between the last one and the batch that fits.
    for _ in range(2 * _TRIES):
        if max_sequences <= fits:
            return None
        if question.with_sequences(max_sequences).refusal() is None:
            return Remedy(((_BATCH, str(max_sequences)),), "has a plan, too")
        max_sequences = (fits + max_sequences) // 2  # states that would leave the device have no room on the host
    return None


# -- Changes one by one, and in combination.


@dataclass(frozen=True)
class _Change:
    """A question with other options than those that were given."""

    question: Question
    options: Options
    words: tuple[str, ...]

    def to(self, question: Question, name: str, value: str | None, words: str) -> _Change:
        return _Change(question, (*self.options, (name, value)), (*self.words, words))

    def done(self) -> Remedy:
        return Remedy(self.options, "; ".join(self.words))


def _policy(question: Question) -> Iterator[Remedy]:
    if question.settings.policy.name == "auto":
        return
    if question.with_policy("auto").refusal() is None:
        yield Remedy(((_POLICY, "auto"),), "what the device has no room for rests on the host")


def _combined(question: Question, error: BudgetError) -> Iterator[Remedy]:
    """Fewer activations, together with what the host then lacks."""
    start = _Change(question, (), ())
    if error.tier != "device":
        yield from _with_room_on_host(start, error)
        return
    if question.cluster.device_bytes is None or question.activations is None:
        return
    changes = [start]
    # A model without a list of blocks has nothing that checkpointing could compute again.
    if not question.batch.is_checkpointed and question.workload.block_bytes:
        other = question.with_checkpointing()
        words = f"activations take {in_words(other.activations or 0)} instead of {in_words(question.activations)}"
        changes.append(start.to(other, _CHECKPOINTING, None, words))
    for change in changes:
        refused = error if change is start else change.question.refusal()
        if refused is None:
            yield change.done()
        elif refused.tier != "device":
            yield from _with_room_on_host(change, refused)
        else:
            yield from _with_fewer_tokens(change, refused.needed_bytes or 0, may_shorten=change is changes[-1])


def _with_fewer_tokens(change: _Change, needed: int, may_shorten: bool) -> Iterator[Remedy]:
    """Whole sequences where one fits, else one shorter sequence, if that is all that is left."""
    question = change.question
    tokens, length = question.tokens_beside(needed), question.batch.length
    if tokens is None or tokens * (_LEAST_PART if may_shorten else 1) < length:
        return
    sequences = max(1, tokens // length)
    fewer = replace(question, batch=replace(question.batch, sequences=sequences, length=min(length, tokens)))
    words = f"activations take {in_words(fewer.activations or 0)}"
    changed = change
    if sequences != question.batch.sequences:
        changed = changed.to(fewer, _BATCH, str(sequences), f"{words} for a micro-batch of {sequences}")
    if tokens < length:
        changed = changed.to(fewer, _LENGTH, str(tokens), f"{words} for a sequence of {tokens} tokens")
    refused = fewer.refusal()
    if refused is None:
        yield changed.done()
    elif refused.tier != "device":
        yield from _with_room_on_host(changed, refused)


def _with_room_on_host(change: _Change, error: BudgetError) -> Iterator[Remedy]:
    """More memory of the tier that is short, and a disk in place of host memory."""
    question, needed, there = change.question, error.needed_bytes, error.budget_bytes
    if needed is None or there is None:
        return
    more = f"{in_words(needed)} for each rank, {in_words(needed - there)} more than there is"
    if question.cluster.is_emulated:
        yield Remedy((), f"Host memory would be enough: {more}.")
    else:  # that the plan which asks for it has a place there needs no try
        option = _DISK if error.tier == "disk" else _HOST
        yield change.to(question, option, as_option(needed), f"of the {error.tier} {more}").done()
    if error.tier != "host" or question.settings.disk_path is not None:
        return
    if question.optim_states == OPTIM_STATES:  # Adam's, which have a smaller form
        small = question.with_small_moments()
        words = f"moments of 8 bits in place of 32, an approximation: HybridAdam(..., state_dtype={SMALL_MOMENTS!r})"
        changed = change.to(small, _OPTIMIZER, SMALL_MOMENTS, words)
        refused = small.refusal()
        if refused is None:
            yield changed.done()
        elif refused.tier == "host" and refused.needed_bytes is not None and not question.cluster.is_emulated:
            more = f"of the host {in_words(refused.needed_bytes)} for each rank"
            yield changed.to(small, _HOST, as_option(refused.needed_bytes), more).done()
    try:
        plan = question.with_disk().plan(is_try=True)
    except BudgetError:
        return
    on_disk = plan.placement.disk_bytes(plan.demand)
    yield change.to(
        question, _DISK, as_option(on_disk), f"{in_words(on_disk)} rest on a local disk of each rank"
    ).done()


def _too_large(question: Question, error: BudgetError, budget: int) -> list[OperatorSpec]:
    """The operators that no packing gives room to, however many ranks there are."""
    if error.tier != "device" or question.settings.stage < 3 or question.cluster.ranks.count == 1:
        return []  # weights that are whole at home need no slots
    spec = question.packed.spec
    return [operator for operator in spec.operators if _least_bytes(operator, spec) > budget]


def _least_bytes(operator: OperatorSpec, spec: ModelSpec) -> int:
    """What an operator in use takes on the device: its weights' slots and a gradient slot for the largest."""
    weights = [spec.weights[place] for place in operator.weights]
    gradient = max((bytes_of(weight) for weight in weights if weight.trainable), default=0)
    return sum(map(bytes_of, weights)) + gradient


def _smaller_operator(operators: list[OperatorSpec], spec: ModelSpec, budget: int) -> Iterator[Remedy]:
    """Name the operator if it, or several that are alike, are all that does not fit."""
    shapes = {tuple(spec.weights[place].shape for place in operator.weights) for operator in operators}
    # Where operators of several shapes are too large, a smaller one of a single shape would not be enough.
    if len(shapes) != 1 or not budget:  # activations have taken the room
        return
    operator = operators[0]
    weight = max((spec.weights[place] for place in operator.weights), key=bytes_of)
    is_of_experts = len(weight.shape) == _DIMENSIONS_OF_EXPERTS and "expert" in weight.name
    smaller = "experts in modules of their own, or a smaller operator," if is_of_experts else "a smaller operator"
    yield Remedy(
        (),
        f"{operator.name or 'The model'} alone needs more than the budget: its largest weight, "
        f"{weight.name.removeprefix(f'{operator.name}.')}, has {in_words(bytes_of(weight))}, and slots and gradient "
        f"slot each hold it whole; {smaller} would need less.",
    )


def _more_ranks(question: Question, error: BudgetError) -> Iterator[Remedy]:
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
    least = 0.0 if cluster.host_bytes is None else question.least_bytes_at_rest() / max(1, per_rank)
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
            yield Remedy(((_RANKS, str(count)),), "with as much memory each they share what does not fit")
            return
        if refused.tier == "device" and (refused.needed_bytes or 0) > _WHOLE * needed:
            return
        needed = refused.needed_bytes or 0


def _more_device_memory(question: Question, needed: int, device: int) -> Iterator[Remedy]:
    """Advise what the chunks need on the device, together with what the host then lacks."""
    enough, host = question.device_bytes_for(needed), question.cluster.host_bytes
    try:
        # The host has no bound here, so that the plan shows how much it would have to hold.
        plan = question.with_memory(enough, None).plan(is_try=True)
    except BudgetError:
        return
    options: Options = ((_DEVICE, as_option(enough)),)
    words, on_host = f"a device with {in_words(enough - device)} more", plan.predicted.host_peak
    if host is not None and on_host > host:  # of two figures that are short neither is enough alone
        options, words = (*options, (_HOST, as_option(on_host))), f"{words}, and {in_words(on_host - host)} on the host"
    yield Remedy(options, words)
