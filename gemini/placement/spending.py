"""Spends a device budget step by step: states move onto the device, chunks keep their slots, slots are added.

The order of steps decides how many bytes cross the link. An update reads and writes parameters, gradient, master and
moments. A chunk with all of them on the device moves nothing; one with only its parameters there moves them to the
update and back, which is as much as two fetches. Numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

from gemini.placement.demand import ChunkDemand, Demand, Kind, Placement, Tier
from gemini.placement.link_bytes import at_rest_bytes
from gemini.placement.policy import Addition, fill_slots, keep_slots, more_slots, slots_for, that_fit

OF_OPTIMIZER = (Kind.MASTER, Kind.OPTIM)
"""States that move together: an update needs both, so one of them alone on the device would travel in every step."""


class Step(Enum):
    """One kind of purchase. It is made for chunks in order of first use, for each one that still fits."""

    FROZEN = "parameters of chunks that are not trained, which no update takes to the host"
    PARAMS = "parameters"
    GRADS = "gradients"
    STATE = "master and moments"
    UPDATED = "gradients, master and moments"
    WHOLE = "all that a chunk has"
    KEPT = "slots that chunks keep around their parameters on the device"
    SLOTS = "slots for all chunks"


_KINDS = {
    Step.FROZEN: (Kind.PARAM,),
    Step.PARAMS: (Kind.PARAM,),
    Step.GRADS: (Kind.GRAD,),
    Step.STATE: OF_OPTIMIZER,
    Step.UPDATED: (Kind.GRAD, *OF_OPTIMIZER),
    Step.WHOLE: (Kind.PARAM, Kind.GRAD, *OF_OPTIMIZER),
}


def spend(demand: Demand, placement: Placement, budget_bytes: int | None, steps: Sequence[Step]) -> Placement:
    """`placement` with more on the device: these steps in order, each as far as the budget lasts."""
    for step in steps:
        if step is Step.SLOTS:
            placement = fill_slots(demand, placement, budget_bytes)
        elif step is Step.KEPT:
            placement = keep_slots(demand, placement, budget_bytes)
        else:
            placement = _move_in(demand, placement, step, budget_bytes)
    # Last, because the best tier for an update depends on where the other states have come to rest.
    return _updated_where_least_moves(demand, placement)


def _updated_where_least_moves(demand: Demand, placement: Placement) -> Placement:
    """`placement`, with the updates of chunks without optimizer state on the tier where they move the fewest bytes.

    SGD without momentum keeps no state, so that either tier costs no memory.
    """
    if all(chunk.optim_states for chunk in demand.chunks):
        return placement
    found: dict[tuple[int, int], dict[Kind, Tier]] = {}  # by chunk and homes, which thousands of chunks share
    keys = list(zip(map(id, demand.chunks), map(id, placement.homes), strict=True))
    for key, chunk, homes in zip(keys, demand.chunks, placement.homes, strict=True):
        if key not in found:
            found[key] = homes
            if not chunk.optim_states and Kind.OPTIM in homes and Kind.GRAD in homes:
                # The homes as they are come first, so that a chunk stays where it is at equal bytes.
                ways = [homes, *({**homes, Kind.OPTIM: tier} for tier in Tier)]
                found[key] = min(ways, key=partial(at_rest_bytes, chunk))  # the first of equal ones
    return replace(placement, homes=tuple(found[key] for key in keys))


def _move_in(demand: Demand, placement: Placement, step: Step, budget_bytes: int | None) -> Placement:
    """Move this step's kinds of states onto the device, all of a chunk together, for the chunks that fit."""
    kinds = frozenset(_KINDS[step])
    # The result depends on the pair (chunk, homes) alone: compute it once per distinct pair of objects.
    found: dict[tuple[int, int], Addition | None] = {}  # by chunk and homes, which thousands of chunks share
    then: dict[tuple[int, int], dict[Kind, Tier]] = {}
    for chunk, homes, _ in placement.alike(demand):
        # Earlier steps may have moved some of the kinds: only what is still on the host costs anything.
        moving = [kind for kind, tier in homes.items() if kind in kinds and tier is Tier.HOST]
        if chunk.is_frozen:  # no step reads what it has of a master and optimizer state
            moving = [kind for kind in moving if kind not in OF_OPTIMIZER]
        # This step is for frozen chunks only: an update on the host would take the parameters of trained ones there and
        # back.
        elif step is Step.FROZEN:
            moving = []
        key = id(chunk), id(homes)
        found[key] = _addition(chunk, moving) if moving else None
        then[key] = {kind: Tier.DEVICE if kind in moving else tier for kind, tier in homes.items()}
    if not any(found.values()):
        return placement
    # Every chunk is tried by itself, in order of first use, though equal ones share what was found above.
    keys = list(zip(map(id, demand.chunks), map(id, placement.homes), strict=True))
    owners = [(index, addition) for index, key in enumerate(keys) if (addition := found[key]) is not None]
    fitting = that_fit(demand, placement, [addition for _, addition in owners], budget_bytes)
    if not fitting:
        return placement
    # Write only to the copies in `then`: `placement` shares its homes among chunks.
    after = list(placement.homes)
    for number in fitting:
        index, _ = owners[number]
        after[index] = then[keys[index]]
    # A chunk that moved in may have been the last user of a slot, so the fewest slots are computed again.
    return more_slots(demand, placement, slots_for(demand, tuple(after), placement.kept))


def _addition(chunk: ChunkDemand, kinds: Sequence[Kind]) -> Addition:
    # A shard at home on the device is gathered into a slot all the same, so it frees none. Likewise a gradient that
    # cannot be accumulated at home.
    return Addition(
        sum(chunk.home_bytes[kind] for kind in kinds),
        chunk.oversize,
        frees_slot=Kind.PARAM in kinds and not chunk.needs_slot,
        frees_gradient_slot=Kind.GRAD in kinds and not chunk.needs_gradient_slot,
    )
