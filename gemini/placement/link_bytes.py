"""Bytes over the link between the tiers in a step, in closed form: quick enough to compare placements by.

`predict.py` counts the same exactly, by following every fetch. Here each fetch of a pass is a payload whose parameters
rest on the host, less those that a slot still has at the turn from a forward to its backward, and from a backward to
the next micro-batch: the last users of a pool, and the first. Weights are taken to be read in every backward.
"""

from __future__ import annotations

from gemini.placement.demand import ChunkDemand, Demand, Kind, Placement, Tier


def link_bytes(demand: Demand, placement: Placement) -> int:
    """Both directions together, on one rank. A pure function: local."""
    fetched: tuple[list[int], list[int]] = [], []  # by size of slots: what a fetch of each user of the pool moves
    for index, (chunk, homes) in enumerate(zip(demand.chunks, placement.homes, strict=True)):
        if homes[Kind.PARAM] is Tier.HOST:
            fetched[chunk.oversize].append(chunk.home_bytes[Kind.PARAM])
        elif chunk.needs_slot and index not in placement.kept:
            fetched[chunk.oversize].append(0)
    num_bytes = sum(
        count * _at_rest(chunk, homes) for chunk, homes, count in placement.alike(demand) if Kind.GRAD in homes
    )
    passes = 2 * demand.micro_batches
    for users, count in zip(fetched, placement.num_slots, strict=True):
        held_for_backward = sum(users[max(0, len(users) - count) :])
        held_for_forward = sum(users[:count])
        turns = demand.micro_batches
        num_bytes += passes * sum(users) - turns * held_for_backward - (turns - 1) * held_for_forward
    return num_bytes


def _at_rest(chunk: ChunkDemand, homes: dict[Kind, Tier]) -> int:
    """What gradients and the update move of a chunk that is trained."""
    link, param, at = chunk.link, homes[Kind.PARAM], homes.get(Kind.OPTIM, homes[Kind.PARAM])
    grad = homes[Kind.GRAD] if chunk.home_bytes[Kind.GRAD] else param  # without a home it takes that of the parameters
    num_bytes = 0
    if param is not at:
        num_bytes += link.read + link.written
    if grad is not at:
        num_bytes += link.summed
    if grad is Tier.HOST:
        num_bytes += link.reduced
    if param is Tier.HOST:
        num_bytes += link.made_whole
    if homes.get(Kind.MASTER, at) is not at:
        num_bytes += 2 * chunk.home_bytes[Kind.MASTER]
    return num_bytes
