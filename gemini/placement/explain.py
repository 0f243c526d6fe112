"""A plan in words: what was chosen and why, what moves in a step, the minimum and what would lower it.

Each function takes numbers and yields sentences, one per line. Byte counts are exact and of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gemini.placement.alternatives import (
    KINDS_IN_WORDS,
    all_at_rest_on_device,
    all_on_device,
    difference_in_words,
    next_better,
    next_worse,
)
from gemini.placement.budget import Budget
from gemini.placement.chunk_facts import Packing
from gemini.placement.chunk_size import BYTES_PER_COLLECTIVE
from gemini.placement.demand import Demand, Kind, Placement, Tier
from gemini.placement.policy import PlacementPolicy
from gemini.placement.predict import Predicted
from gemini.placement.sizes import format_bytes
from gemini.placement.traffic import Exchange
from gemini.settings import Settings

_NAMES = {
    Exchange.GATHER: "shards of weights",
    Exchange.REDUCE: "gradients",
    Exchange.WHOLE_GRADIENT: "reduced gradients",
    Exchange.WHOLE_WEIGHT: "updated weights",
}


def chunks_in_words(
    packing: Packing, stage: int, world_size: int, policy: str, infers: bool, is_first: bool
) -> Iterator[str]:
    """The number of chunks, their size, and the reason for that size.

    is_first: the size was searched for the budgets of this plan, not for earlier ones.
    """
    num_weights = sum(len(chunk.names) for chunk in packing.chunks)
    num_oversize = sum(chunk.oversize for chunk in packing.chunks)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    yield f"{num_weights} weights are planned for {ranks} at stage {stage} with tensor_placement_policy={policy!r}."
    if infers:
        yield (
            "This plan is for inference: nothing that only training needs has a place in it. Another plan comes in "
            "force when an optimizer is made, or with the first forward that builds a graph."
        )
    else:
        yield "This plan is for training."
    alone = f"; {num_oversize} of them are larger and hold one unit each" if num_oversize else ""
    yield f"They lie in {len(packing.chunks)} chunks of up to {_bytes(packing.chunk_bytes)}{alone}."
    found = packing.searched
    if found is None:
        yield "This chunk size was given with chunk_size=."
        return
    # The size is fixed at wrapping, so a later plan has the one that was best under the budgets of that time.
    budgets = "these budgets" if is_first else "those of wrapping"
    yield (
        f"The search took this chunk size as the cheapest under {budgets}: "
        f"{_bytes(found.padding_bytes)} of padding, {_bytes(found.gathered_bytes)} in slots at the busiest moment, and "
        f"{found.num_collectives} collectives in a step, each counted as {_bytes(BYTES_PER_COLLECTIVE)}."
    )


def states_in_words(demand: Demand, placement: Placement, budget: Budget) -> Iterator[str]:
    """The bytes at rest on each tier, the slots, and the totals beside the budgets."""
    for tier in Tier:
        rest = {kind: _at_rest(demand, placement, kind, tier) for kind in Kind}
        found = [f"{words} {_bytes(rest[kind])}" for kind, words in KINDS_IN_WORDS.items() if rest[kind]]
        yield f"At rest on the {tier}: {', '.join(found) or 'nothing'}."
    if placement.kept:
        # The parameter home inside the slot is among the weights at rest, in the lines above.
        around = sum(demand.chunks[i].payload_bytes - demand.chunks[i].home_bytes[Kind.PARAM] for i in placement.kept)
        yield f"{len(placement.kept)} chunks keep a slot around their weights on the device: {_bytes(around)} more."
    for words, counts, sizes in (
        ("slot", placement.num_slots, demand.slot_bytes),
        ("gradient slot", placement.num_gradient_slots, demand.gradient_slot_bytes),
    ):
        pairs = zip(counts, sizes, strict=True)
        found = [f"{count} {words}{'s' * (count > 1)} of {_bytes(size)}" for count, size in pairs if count]
        if found:
            yield f"The device has {' and '.join(found)}."
    if demand.scratch_bytes:
        yield f"Temporaries of reductions take {_bytes(demand.scratch_bytes)} of the device."
        if demand.whole_scratch_bytes is not None:
            yield (
                "Gradients of the largest weights are exchanged in tiles, because the device has no room for the "
                f"{_bytes(demand.whole_scratch_bytes)} that it takes to exchange them at once."
            )
    for tier, held, limit in (
        (Tier.DEVICE, placement.device_bytes(demand), budget.device),
        (Tier.HOST, placement.host_bytes(demand), budget.host),
    ):
        bound = "no budget was set" if limit is None else f"the budget is {_bytes(limit)}"
        yield f"In all, the {tier} holds {_bytes(held)}; {bound}."


def moves_in_words(demand: Demand, placement: Placement, world_size: int, infers: bool) -> Iterator[str]:
    """The bytes that travel in each micro-batch and once in a step, or in each forward without gradients."""
    chunks = list(zip(demand.chunks, placement.homes, strict=True))
    from_host = [chunk for chunk, homes in chunks if homes[Kind.PARAM] is Tier.HOST]
    # `needs_slot` means that this rank has only a shard of the parameters.
    gathered = [chunk for chunk, _ in chunks if chunk.needs_slot]
    trained = [chunk for chunk, homes in chunks if Kind.GRAD in homes]
    grads = _at_rest(demand, placement, Kind.GRAD, Tier.HOST)
    # Weights travel to the update and back where they rest on another tier than the optimizer state.
    apart = [homes for _, homes in chunks if homes.get(Kind.OPTIM, homes[Kind.PARAM]) is not homes[Kind.PARAM]]
    found = []
    if from_host:
        num_bytes = sum(chunk.home_bytes[Kind.PARAM] for chunk in from_host)
        found.append(f"Weights of {len(from_host)} chunks come from the host when they are used: {_bytes(num_bytes)}.")
    if gathered:
        num_bytes = sum(chunk.payload_bytes for chunk in gathered)
        found.append(f"{len(gathered)} chunks are gathered from all ranks when they are used: {_bytes(num_bytes)}.")
    if found and not infers:
        found.append("Backward fetches again what has left its slot since forward.")
    if world_size > 1 and trained:
        num_bytes = sum(chunk.payload_bytes for chunk in trained)
        found.append(f"Gradients of {len(trained)} chunks are exchanged with all ranks: {_bytes(num_bytes)}.")
    if grads:
        found.append(f"Reduced gradients go to the host: {_bytes(grads)}.")
    if apart:
        found.append(f"Of {len(apart)} chunks the update runs on the other tier: weights go there and back.")
    yield from found or [f"Nothing moves in a {'forward' if infers else 'step'}."]


def predicted_in_words(predicted: Predicted, micro_batches: int, infers: bool) -> Iterator[str]:
    """The exact bytes of a predicted step. `Plan.predicted` says which assumptions make it exact.

    micro_batches: the number that the step was predicted with. infers: `predicted` is a forward without gradients.
    """
    step = f"a step of {micro_batches} micro-batches" if micro_batches > 1 else "a step"
    # A plan for inference predicts a forward without gradients, which has no micro-batches.
    step = "a forward" if infers else step
    links = predicted.bytes_by_link
    both = (("host->device", "from the host to the device"), ("device->host", "from the device to the host"))
    found = [f"{_bytes(links[link])} {words}" for link, words in both if links.get(link)]
    if found:
        yield f"In all, {step} copies {' and '.join(found)}."
    launches = [
        f"{count} times {_NAMES[what]}, {_bytes(num_bytes)} in all"
        for what, (count, num_bytes) in sorted(predicted.exchanged.items())
    ]
    if launches:
        yield f"Ranks exchange in {step}: {'; '.join(launches)}."


def budgets_in_words(demand: Demand, placement: Placement, budget: Budget, policy: PlacementPolicy) -> Iterator[str]:
    """The changes that a larger and a smaller device budget would bring, with these chunks."""
    held, there = placement.device_bytes(demand), budget.device
    # From this budget on the policy uses no more.
    everything = all_on_device(demand, policy)
    most = None if everything is None else everything.budget_bytes
    if most is None:
        yield "The policy does not say what it would do without a budget."
    elif there is None or there >= most:
        yield "More room on the device would change nothing."
    else:
        # States at rest need less than that: what is left then buys slots.
        at_rest = all_at_rest_on_device(demand, policy)
        better = next_better(demand, placement, there, policy)
        if better is not None:
            changes = difference_in_words(demand, placement, better)
            yield f"With {_bytes(better.budget_bytes - there)} more on the device, {changes}."
        # With exchanges in tiles everything may rest there already, on less than it takes with exchanges at once.
        if at_rest is not None and at_rest > there and placement.host_bytes(demand):
            yield f"With {_bytes(at_rest - there)} more, everything would rest on the device."
        yield f"With {_bytes(most - there)} more, nothing would have to leave a slot; still more would change nothing."
    # The first change comes one byte below what the placement takes, not below the budget: what is not used can go
    # first.
    worse = next_worse(demand, placement, policy)
    spare = 0 if there is None else there - held
    less = f"{_bytes(spare)} of the budget are not used. With one byte less than the others" if spare else ""
    less = less or "With one byte less on the device than it holds"
    changes = "there would be no placement" if worse is None else difference_in_words(demand, placement, worse)
    yield f"{less}, {changes}."


def other_choices(settings: Settings, is_first: bool) -> Iterator[tuple[str, Settings]]:
    """Changes of settings that may lower the minimum: each in words, with the settings that result.

    Existing chunks keep their size, so after wrapping each change means to wrap the model again.
    """
    # The words begin a sentence, which `minimum_in_words` ends.
    again = "" if is_first else "Wrapping again with "
    if not is_first:
        yield "Wrapping again", settings
    if settings.chunk_size is not None:
        yield f"{again}chunk_size=None", replace(settings, chunk_size=None)
    if settings.policy.name != "auto":
        yield f"{again}tensor_placement_policy='auto'", settings.with_policy("auto")


def minimum_in_words(
    minimum: int | None, others: Mapping[str, int | None], largest: tuple[str, int], infers: bool, is_first: bool
) -> Iterator[str]:
    """The least model data that the device must hold, in bytes, and what would lower it.

    others: the minimum after each change of `other_choices`. largest: the operator with the most bytes in slots, and
    these bytes. is_first: the chunk size can still change.
    """
    if minimum is None:
        yield "The policy does not say what its minimum is."
        return
    cannot = f"with a smaller budget the model cannot {'infer' if infers else 'train'}"
    the = "The" if is_first else "With these chunks the"
    yield f"{the} minimum of model data on the device is {_bytes(minimum)}: {cannot}."
    # A user's policy may not say its minimum: then it cannot be compared.
    lower = {words: least for words, least in others.items() if least is not None and least < minimum}
    for words, least in lower.items():
        yield f"{words} would lower it to {_bytes(least)}."
    if not lower:
        choices = "No other chunk size and no other policy" if is_first else "No wrapping with other chunks or policy"
        yield (
            f"{choices} lowers it. Smaller operators do: the largest is {largest[0]!r}, with {_bytes(largest[1])} in "
            "slots."
        )


def _at_rest(demand: Demand, placement: Placement, kind: Kind, tier: Tier) -> int:
    return sum(
        chunk.home_bytes[kind]
        for chunk, homes in zip(demand.chunks, placement.homes, strict=True)
        if homes.get(kind) is tier
    )


def _bytes(num_bytes: int) -> str:
    """The exact number of bytes, with a rounded one in brackets where the exact one is hard to read."""
    # Below 10 KiB the rounded number is the exact one, and is not said twice.
    short = format_bytes(num_bytes)
    return f"{num_bytes} bytes" if short == f"{num_bytes} B" else f"{num_bytes} bytes ({short})"
