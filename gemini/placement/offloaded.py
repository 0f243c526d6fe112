"""The plan of a model whose states leave the device between steps, so that another model can use the device.

It is an ordinary plan with the same chunks and homes on the host, so parameters can be read and the model can even
train with it. `replan` returns to the policy's placement.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gemini.placement.demand import ChunkDemand, Kind, Tier
from gemini.placement.needs import min_slots
from gemini.placement.plan import Plan, hash_of
from gemini.placement.policy import slots_for


def offloaded(before: Plan, kinds: Collection[Kind]) -> Plan:
    """`before` with these states of all chunks on the host, in addition to those that it has offloaded already.

    Gradients get no homes on the host, because between steps they hold nothing. A gradient that arrives nevertheless
    takes memory at that moment.
    """
    offloaded_kinds = before.offloaded | frozenset(kinds)
    demand, placement = before.demand, before.placement
    homes = tuple(
        {kind: Tier.HOST if kind in offloaded_kinds else tier for kind, tier in chunk_homes.items()}
        for chunk_homes in placement.homes
    )
    demand = replace(demand, chunks=tuple(_without_gradients(chunk, offloaded_kinds) for chunk in demand.chunks))
    # Persistent parameters leave the device too. The least slots were computed without them, and they need slots now.
    if Kind.PARAM in offloaded_kinds:
        least = min_slots(before.packing.chunks, before.spec.operators, before.use_order)
        demand = replace(demand, min_slots=least, max_live_numel=None)
    # A kept slot contains the parameter home on the device, so it goes when the parameters go.
    moved = slots_for(demand, homes, () if Kind.PARAM in offloaded_kinds else placement.kept)
    if Kind.PARAM not in offloaded_kinds:
        # `slots_for` gives the fewest slots, but parameters that stay keep all that the plan has.
        moved = replace(moved, num_slots=placement.num_slots)
    # Ranks compare plans by this hash, so offloading on some ranks only is noticed.
    hash_ = hash_of(before.packing, moved, before.settings, before.trained, demand.scratch_bytes)
    return replace(before, demand=demand, placement=moved, hash=hash_, is_first=False, offloaded=offloaded_kinds)


def _without_gradients(chunk: ChunkDemand, left: Collection[Kind]) -> ChunkDemand:
    if Kind.GRAD not in left or Kind.GRAD not in chunk.home_bytes:
        return chunk
    return replace(chunk, home_bytes={**chunk.home_bytes, Kind.GRAD: 0})
