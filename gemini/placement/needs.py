"""The memory that chunks need on one rank: bytes of each state, slots, scratch. Turns facts into a `Demand`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from gemini.placement.chunk_facts import ChunkFacts
from gemini.placement.demand import OPTIM_STATES, ChunkDemand, Demand, Kind, LinkBytes
from gemini.placement.dtypes import FLOAT32
from gemini.placement.scratch import scratch_bytes, tiled_scratch_bytes
from gemini.placement.specs import ModelSpec, OperatorSpec


def uses_of(chunks: Sequence[ChunkFacts], spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """The chunks that each operator uses, by index, in the order of `spec.operators`."""
    chunk_of = {name: chunk.index for chunk in chunks for name in chunk.names}
    places = [chunk_of[weight.name] for weight in spec.weights]
    # Sorted, because an operator's chunks are fetched in this order, and a fetch is a collective.
    return tuple(tuple(sorted({places[weight] for weight in operator.weights})) for operator in spec.operators)


def _uses_of_slots(chunks: Sequence[ChunkFacts], spec: ModelSpec) -> Sequence[Sequence[int]]:
    """`uses_of`, without chunks whose parameters are never in a slot."""
    uses = uses_of(chunks, spec)
    persistent = {chunk.index for chunk in chunks if chunk.persists}  # membership only
    return [[index for index in own if index not in persistent] for own in uses] if persistent else uses


def demand_of(
    chunks: Sequence[ChunkFacts],
    spec: ModelSpec,
    trained: Iterable[bool],
    kept: Mapping[int, frozenset[Kind]],
    stage: int,
    world_size: int,
    max_live_numel: int | None = None,
    *,
    micro_batches: int = 1,
    max_host_bytes: int | None = None,
    optim_states: Sequence[int] | None = None,
) -> Demand:
    """The demand of these chunks.

    trained: for each weight, in the order of the chunks. kept: the states that frozen chunks still have, by chunk
    index. micro_batches: per step, whose gradients are added up. max_host_bytes: budget of the host. None: no bound.
    optim_states: how many states per element the optimizer keeps, by chunk. None: Adam's two.
    """
    # One trained weight makes its chunk a trained one: gradient and optimizer state are allocated per chunk.
    flags = iter(trained)
    # All chunks take their flags from one iterator. The list makes each chunk take all of its own: `any` alone would
    # stop at the first trained weight and leave the other flags to the next chunk.
    trainable = [chunk for chunk in chunks if any(list(islice(flags, len(chunk.names))))]
    indices = {chunk.index for chunk in trainable}  # membership only
    # Equal chunks share one object, so nobody may write to it. `Placement.alike` groups chunks by this identity.
    demands: dict[tuple[object, ...], ChunkDemand] = {}
    of_chunks = []
    states = [OPTIM_STATES] * len(chunks) if optim_states is None else optim_states
    for chunk, num_states in zip(chunks, states, strict=True):
        is_trained, has = chunk.index in indices, kept.get(chunk.index, frozenset())
        alike = _key_of(chunk), is_trained, has, num_states
        if alike not in demands:
            demands[alike] = _chunk_demand(chunk, is_trained, has, stage, world_size, micro_batches, num_states)
        of_chunks.append(demands[alike])
    return Demand(
        tuple(of_chunks),
        (_largest(chunks), _largest(chunks, oversize=True)),
        min_slots(chunks, spec.operators, _uses_of_slots(chunks, spec)),
        (_largest(trainable), _largest(trainable, oversize=True)),
        # Two regular slots: while ranks exchange the gradient in one, autograd fills the other instead of waiting.
        # `slots_for` lowers these to the number of users. A chunk without elements counts as a user.
        (2, 1),
        scratch_bytes(trainable, stage, world_size),
        (_largest_numel(chunks), _largest_numel(chunks, oversize=True)),
        max_live_numel,
        micro_batches,
        max_host_bytes,
        tiled_scratch_bytes(trainable, stage, world_size),
    )


def _key_of(chunk: ChunkFacts) -> tuple[object, ...]:
    """The facts that `_chunk_demand` reads. The three layouts are of the same elements."""
    layout = chunk.layout
    return (
        layout.numel,
        len(layout.units),
        layout.world_size,
        chunk.home_layout.world_size,
        chunk.optim_layout.world_size,
        id(chunk.dtypes),  # chunks of equal dtypes have one object, whose hash takes as long as all the rest
        chunk.itemsize,
        chunk.oversize,
        chunk.may_lend_home,
        chunk.splits_master,
        chunk.persists,
    )


def _chunk_demand(
    chunk: ChunkFacts,
    is_trained: bool,
    kept: frozenset[Kind],
    stage: int,
    world_size: int,
    micro_batches: int,
    optim_states: int,
) -> ChunkDemand:
    dtypes, optim_numel = chunk.dtypes, chunk.optim_layout.shard_numel
    home_bytes = {Kind.PARAM: chunk.home_layout.shard_numel * dtypes.weight.itemsize}
    if is_trained:
        home_bytes[Kind.GRAD] = _gradient_home_numel(chunk, stage, micro_batches) * dtypes.rest.itemsize
        # From the second micro-batch on the sum is kept in fp32, in addition to the 16-bit home.
        if micro_batches > 1 and dtypes.widens:
            home_bytes[Kind.GRAD] += FLOAT32.itemsize * optim_numel
    # A frozen chunk keeps a master that holds more than the 16-bit weights, which could not be made again from them.
    if dtypes.weight.is_half and (is_trained or Kind.MASTER in kept):
        home_bytes[Kind.MASTER] = chunk.master_itemsize * optim_numel
    if is_trained or Kind.OPTIM in kept:
        # fp64 weights have fp64 states, all others have fp32 ones.
        home_bytes[Kind.OPTIM] = optim_states * max(4, dtypes.weight.itemsize) * optim_numel
    is_sharded = chunk.home_layout.world_size > 1
    # With one rank, fp32 micro-batches accumulate in the gradient home itself. Several ranks, and gradients that rest
    # in another dtype or in 16 bits, need a slot: the new gradient must not overwrite the running sum.
    accumulates_at_home = world_size == 1 and not dtypes.weight.is_half and dtypes.rest == dtypes.weight
    return ChunkDemand(
        chunk.payload_bytes,
        home_bytes,
        chunk.oversize,
        needs_slot=is_sharded,
        needs_gradient_slot=not accumulates_at_home,
        may_keep_slot=is_sharded and len(chunk.layout.units) == 1,
        is_frozen=not is_trained,
        persists=chunk.persists,
        numel=chunk.layout.numel,
        link=_link_bytes(chunk, stage, world_size, micro_batches) if is_trained else LinkBytes(),
        optim_states=optim_states,
    )


def _link_bytes(chunk: ChunkFacts, stage: int, world_size: int, micro_batches: int) -> LinkBytes:
    """The bytes that cross the link in a step if the chunk's states rest on two tiers, as `simulate.py` counts them."""
    dtypes, numel = chunk.dtypes, chunk.optim_layout.shard_numel
    updated = dtypes.weight.itemsize * numel
    is_wide = micro_batches > 1 and dtypes.widens
    # One rank copies the gradient in the weight's dtype, unless it is rounded on the device before (`narrows`).
    arriving = dtypes.weight if world_size == 1 and not dtypes.narrows else dtypes.rest
    # At stage 0 every rank keeps the whole mean, at all other stages its own part.
    reduced = micro_batches * arriving.itemsize * (chunk.layout.numel if stage == 0 else chunk.layout.shard_numel)
    if world_size == 1 and not dtypes.weight.is_half and dtypes.rest == dtypes.weight:
        # One rank resumes its fp32 sum, so each further micro-batch first brings the sum to the device.
        reduced += (micro_batches - 1) * updated
    return LinkBytes(
        read=0 if dtypes.weight.is_half and not chunk.splits_master else updated,
        written=updated,
        summed=numel * (FLOAT32.itemsize if is_wide else dtypes.rest.itemsize),
        reduced=reduced,
        made_whole=chunk.payload_bytes if chunk.home_layout.world_size < chunk.optim_layout.world_size else 0,
    )


def _gradient_home_numel(chunk: ChunkFacts, stage: int, micro_batches: int) -> int:
    """Elements of the gradient's own home: the whole payload at stages 0 and 1, else this rank's shard."""
    # The reduced gradient takes the memory of the parameters, unless another micro-batch needs these.
    if chunk.may_lend_home and micro_batches == 1:
        return 0
    optim_numel = chunk.optim_layout.shard_numel
    # Autograd writes to a home only in the weight's dtype. A home of another dtype is never a payload, so it holds no
    # more than the elements that this rank updates.
    if stage >= 2 or chunk.layout.world_size == 1 or chunk.dtypes.rest != chunk.dtypes.weight:
        return optim_numel
    # With several units this rank's part of a whole gradient is in pieces, and the update needs it in one: hence both.
    several_units = stage == 1 and len(chunk.layout.units) > 1
    return chunk.layout.numel + (optim_numel if several_units else 0)


def _largest(chunks: Sequence[ChunkFacts], oversize: bool = False) -> int:
    return max((chunk.payload_bytes for chunk in chunks if chunk.oversize is oversize), default=0)


def _largest_numel(chunks: Sequence[ChunkFacts], oversize: bool = False) -> int:
    return max((chunk.layout.numel for chunk in chunks if chunk.oversize is oversize), default=0)


def min_slots(
    chunks: Sequence[ChunkFacts], operators: Sequence[OperatorSpec], uses: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """The number of slots of both sizes that the busiest moment needs, as far as is known without a trace.

    That is the largest union of the chunks of all operators on one path of the module tree, and one more regular slot
    if there are enough chunks: a recomputation inside an autograd node, or a function that uses another operator's
    parameter, holds one chunk beside them.
    """
    need, now = [0, 0], [0, 0]  # by size; now: of the path that ends at the operator at hand
    is_oversize = [chunk.oversize for chunk in chunks]
    users: Counter[int] = Counter()  # chunk -> operators on the path that use it
    path: list[Sequence[int]] = []
    # Parents come before children, so the path changes only at its end. Counting what enters and leaves keeps this
    # linear; a union per operator would be quadratic in the depth.
    for operator, own in zip(operators, uses, strict=True):
        while len(path) > len(operator.ancestors):
            for index in path.pop():
                users[index] -= 1
                now[is_oversize[index]] -= not users[index]
        path.append(own)
        for index in own:
            now[is_oversize[index]] += not users[index]
            users[index] += 1
        if now[0] > need[0] or now[1] > need[1]:
            need = [max(pair) for pair in zip(need, now, strict=True)]
    totals = is_oversize.count(False), is_oversize.count(True)
    return min(need[0] + 1, totals[0]), min(need[1], totals[1])
