"""Bytes over the link between the tiers in a step, in closed form: fast enough to compare placements.

`predict.py` counts the same bytes exactly, by following every fetch. Here each pass fetches all payloads whose
parameters rest on the host, except those still in a slot at a turn: a backward begins with the last users of the pool
in their slots, and the next micro-batch with the first ones. Every backward is assumed to read all weights.
"""

from __future__ import annotations

from gemini.placement.demand import ChunkDemand, Demand, Kind, Placement, Tier


def link_bytes(demand: Demand, placement: Placement) -> int:
    """Bytes in both directions together, on one rank. A pure function: local."""
    # A chunk that is gathered from device shards moves no byte over the link, but occupies a slot: count it as 0.
    fetched: tuple[list[int], list[int]] = [], []  # by size of slots: what a fetch of each user of the pool moves
    for index, (chunk, homes) in enumerate(zip(demand.chunks, placement.homes, strict=True)):
        if homes[Kind.PARAM] is Tier.HOST:
            fetched[chunk.oversize].append(chunk.home_bytes[Kind.PARAM])
        elif chunk.needs_slot and index not in placement.kept:
            fetched[chunk.oversize].append(0)
    num_bytes = sum(
        count * at_rest_bytes(chunk, homes) for chunk, homes, count in placement.alike(demand) if Kind.GRAD in homes
    )
    passes = 2 * demand.micro_batches
    for users, count in zip(fetched, placement.num_slots, strict=True):
        held_for_backward = sum(users[max(0, len(users) - count) :])
        held_for_forward = sum(users[:count])
        # Every backward finds the last users of its forward in the slots. The first forward of a step finds none,
        # because the update before it has outdated all payloads.
        turns = demand.micro_batches
        num_bytes += passes * sum(users) - turns * held_for_backward - (turns - 1) * held_for_forward
    return num_bytes


def at_rest_bytes(chunk: ChunkDemand, homes: dict[Kind, Tier]) -> int:
    """The bytes that gradients and the update move for a trained chunk."""
    link, param, at = chunk.link, homes[Kind.PARAM], homes.get(Kind.OPTIM, homes[Kind.PARAM])
    grad = homes[Kind.GRAD] if chunk.home_bytes[Kind.GRAD] else param  # without a home it rests in the parameters'
    num_bytes = 0
    if param is not at:
        num_bytes += link.read + link.written
    if grad is not at:
        num_bytes += link.summed
    if grad is Tier.HOST:
        num_bytes += link.reduced
    # Every rank updates its part of weights that it holds whole, and copies the parts of the others to the host.
    if param is Tier.HOST:
        num_bytes += link.made_whole
    # The update reads and writes the master, so it travels both ways.
    if homes.get(Kind.MASTER, at) is not at:
        num_bytes += 2 * chunk.home_bytes[Kind.MASTER]
    return num_bytes
