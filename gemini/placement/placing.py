"""Checks of a policy's answer, so that a mistake in a user's policy raises before any state moves.

The checks look at numbers only and run in the same order on all ranks. A policy whose answers differ between ranks is
detected when ranks compare the hashes of their plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from gemini.errors import BudgetError
from gemini.placement.demand import ChunkDemand, Demand, Kind, Placement, Tier
from gemini.placement.policy import PlacementPolicy, check_fits, slots_for

PLACE_ALIKE = (
    "All ranks must build the same model with the same arguments, and a policy's place(demand, budget_bytes) must "
    "follow from its arguments alone"
)
_MAX_RUNS = 20
"""At most this many runs of chunks are listed per kind, because every rank sends the text to all others."""


def place(demand: Demand, budget_bytes: int | None, policy: PlacementPolicy) -> Placement:
    """The policy's placement, checked to be one that training can use.

    Raises TypeError or ValueError if the answer is not a placement of these chunks, and BudgetError if it exceeds the
    device budget or `max_live_parameters`.
    """
    placement = policy.place(demand, budget_bytes)
    if not isinstance(placement, Placement):
        raise TypeError(f"{_named(policy)} must return a Placement, found {type(placement).__name__}")
    # The first problem is raised and the others are not looked for: later checks rely on what the earlier ones have
    # shown.
    for problem in _problems(demand, placement):
        raise ValueError(f"{_named(policy)} {problem}")
    # A user's policy may return a placement beyond the budget instead of raising.
    check_fits(demand, placement, budget_bytes, policy.name)
    _check_live(demand, placement, policy.name)
    return placement


def place_in_budget(demand: Demand, budget_bytes: int | None, policy: PlacementPolicy) -> tuple[Demand, Placement]:
    """The policy's placement, and the demand that it meets: with exchanges at once, or in tiles if only that fits.

    Raises what `place` does.
    """
    whole = demand.at_once()
    try:
        return whole, place(whole, budget_bytes, policy)
    except BudgetError:
        tiled = whole.in_tiles()
        if tiled is whole:
            raise
        return tiled, place(tiled, budget_bytes, policy)


def place_unbounded(demand: Demand, policy: PlacementPolicy) -> Placement:
    """Return the policy's placement without a bound, which shows what more memory would change.

    Raises what the policy raises, with a note where that is no BudgetError: the user may have given a budget, and be
    surprised that the policy is asked without one.
    """
    try:
        return policy.place(demand, None)
    # Callers take a refusal for an answer, so it needs no note.
    except BudgetError:
        raise
    except Exception as error:
        error.add_note(
            f"{_named(policy)} was asked with budget_bytes=None, which means that there is no bound: gemini asks so to "
            "see what more memory would change. A policy that needs a bound may raise BudgetError there"
        )
        raise


def placement_in_words(placement: Placement, budget_bytes: int | None) -> str:
    """Budget, slots and homes, one line per kind. Ranks compare this text to show how their placements differ."""
    lines = [
        f"model data budget of {budget_bytes} bytes",
        f"{placement.num_slots} slots, {placement.num_gradient_slots} gradient slots",
    ]
    for kind in Kind:
        # Chunks are many and placements regular: list runs of chunks on one tier.
        runs, end = [], 0
        # A chunk without this kind has no tier: it ends a run and begins none.
        for tier, its in groupby(homes.get(kind) for homes in placement.homes):
            start, end = end, end + len(list(its))
            if tier is not None:
                runs.append(f"chunks {start} to {end - 1} on the {tier}")
        lines.append(f"{kind}: {', '.join(runs[:_MAX_RUNS])}{' and more' if len(runs) > _MAX_RUNS else ''}")
    kept = sorted(placement.kept)
    lines.append(f"{len(kept)} chunks keep their slots, the last one is {max(kept, default='none')}")
    return "\n".join(lines)


def _named(policy: PlacementPolicy) -> str:
    return f"tensor_placement_policy={policy.name!r}: place(demand, budget_bytes)"


def _problems(demand: Demand, placement: Placement) -> Iterator[str]:
    """Everything that is wrong with the placement, as ends of sentences whose subject is the policy."""
    homes, num_chunks = placement.homes, len(demand.chunks)
    if len(homes) != num_chunks:
        yield f"gave homes of {len(homes)} chunks, and the model has {num_chunks}: one for each of demand.chunks"
        return  # the checks below pair homes with chunks
    for index, (chunk, chunk_homes) in enumerate(zip(demand.chunks, homes, strict=True)):
        yield from _problems_of(index, chunk, chunk_homes)
    for index in sorted(placement.kept):
        # A negative index would name a chunk from the end.
        if not 0 <= index < num_chunks:
            yield f"keeps a slot for chunk {index}, and there are {num_chunks}"
        elif not demand.chunks[index].may_keep_slot:
            yield f"keeps a slot for chunk {index}, whose may_keep_slot is False"
        elif homes[index][Kind.PARAM] is not Tier.DEVICE:
            yield f"keeps a slot for chunk {index}, whose parameters are not at home on the device"
    # `place` raises at the first problem, so homes and kept slots are valid from here on.
    least = slots_for(demand, homes, placement.kept)
    for name, counts, wanted in (
        ("num_slots", placement.num_slots, least.num_slots),
        ("num_gradient_slots", placement.num_gradient_slots, least.num_gradient_slots),
    ):
        if len(counts) != 2 or any(has < needs for has, needs in zip(counts, wanted, strict=True)):
            yield f"gave {name}={counts}, and training needs {wanted}: slots_for() has the fewest that work"


def _problems_of(index: int, chunk: ChunkDemand, homes: dict[Kind, Tier]) -> Iterator[str]:
    if homes.keys() != chunk.home_bytes.keys():
        found, wanted = (", ".join(sorted(map(str, keys))) or "nothing" for keys in (homes, chunk.home_bytes))
        yield f"gave chunk {index} homes for {found}, and it has {wanted}"
        return
    # The text "device" equals `Tier.DEVICE`, but plans compare tiers by identity: it would count as neither tier.
    other = next((tier for tier in homes.values() if not isinstance(tier, Tier)), None)
    if other is not None:
        yield f"gave chunk {index} the home {other!r}, which is no Tier: choose one of {', '.join(map(str, Tier))}"
    elif chunk.persists and homes[Kind.PARAM] is not Tier.DEVICE:
        yield (
            f"puts the parameters of chunk {index} onto the {homes[Kind.PARAM]}, and they persist on the device: see "
            "param_persistence_threshold="
        )


def _check_live(demand: Demand, placement: Placement, policy: str) -> None:
    most, needed = demand.max_live_numel, placement.live_numel(demand)
    if most is not None and needed > most:
        # No `needed_bytes`: more memory would not help, only a larger bound or smaller chunks.
        raise BudgetError(
            f"max_live_parameters={most} is less than the {needed} elements, paddings included, that the fewest slots "
            f"of tensor_placement_policy={policy!r} hold: allow {needed}",
            needed_numel=needed,
        )
