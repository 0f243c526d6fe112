"""The bytes that a step moves and updates, by resource: the input of the cost model, from a plan's prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemini.placement.chunk_facts import ChunkFacts
from gemini.placement.demand import Kind, Tier
from gemini.placement.traffic import Exchange

if TYPE_CHECKING:
    from gemini.placement.plan import Plan
    from gemini.placement.predict import Predicted


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Bytes of one rank in a step.

    Args:
        to_device_bytes: bytes over the link from the host.
        to_host_bytes: bytes over the link to the host.
        gathered_bytes: bytes of the payloads that are gathered from all ranks.
        num_gathers: the number of these gathers.
        exchanged_bytes: bytes of the gradient payloads that ranks exchange, in the dtype in which they travel.
        num_exchanges: the number of these exchanges.
        device_update_bytes: bytes that the optimizer's update reads and writes on the device.
        host_update_bytes: the same on the host.
    """

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    gathered_bytes: int = 0
    num_gathers: int = 0
    exchanged_bytes: int = 0
    num_exchanges: int = 0
    device_update_bytes: int = 0
    host_update_bytes: int = 0


def moves_of(plan: Plan, predicted: Predicted | None = None) -> Moves:
    """The moves of a training step in which every trained weight gets a gradient. Pure: local.

    predicted: the prediction of that step. None: `plan.predicted`.
    """
    predicted = predicted or plan.predicted
    links = predicted.bytes_by_link
    reduced = predicted.exchanged.get(Exchange.REDUCE, (0, 0))
    # Every exchange but a reduction is an all-gather.
    gathers = [found for what, found in predicted.exchanged.items() if what is not Exchange.REDUCE]
    updated = {Tier.DEVICE: 0, Tier.HOST: 0}
    its = zip(plan.packing.chunks, plan.demand.chunks, plan.placement.homes, strict=True)
    for facts, chunk, homes in its:
        if Kind.GRAD in homes:  # frozen chunks have no gradient and are not updated
            # An update runs on the tier of the optimizer state. A chunk without any, as with plain SGD, has such a tier
            # too.
            updated[homes[Kind.OPTIM]] += update_bytes(facts, chunk.optim_states)
    return Moves(
        to_device_bytes=links.get("host->device", 0),
        to_host_bytes=links.get("device->host", 0),
        gathered_bytes=sum(num_bytes for _, num_bytes in gathers),
        num_gathers=sum(count for count, _ in gathers),
        exchanged_bytes=reduced[1],
        num_exchanges=reduced[0],
        device_update_bytes=updated[Tier.DEVICE],
        host_update_bytes=updated[Tier.HOST],
    )


def update_bytes(facts: ChunkFacts, optim_states: int) -> int:
    """Bytes that an update reads and writes for a chunk on one rank.

    Adam, with two states, takes 26 bytes per parameter with split masters and 28 in fp32.
    """
    dtypes = facts.dtypes
    # The factors of 2 stand for a read and a write. The gradient is only read, once. fp64 weights have fp64 states, all
    # others have fp32 ones.
    states = 2 * optim_states * max(4, dtypes.weight.itemsize)
    master = 2 * facts.master_itemsize if dtypes.weight.is_half else 0
    # The update writes the weight. It reads the weight only where that is the master or the upper half of a split one.
    weight = dtypes.weight.itemsize * (1 if dtypes.weight.is_half and not facts.splits_master else 2)
    return facts.optim_layout.shard_numel * (states + master + weight + dtypes.rest.itemsize)
