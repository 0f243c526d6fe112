"""What chunks need of each tier, with scratch, and what that allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from gemini.placement.demand import (
    FLOAT32,
    ON_THE_CPU,
    OPTIM_STATES,
    WITH_STREAMS,
    ChunkDemand,
    Costs,
    Demand,
    Dtype,
    Kind,
    LinkBytes,
    ModelSpec,
    OperatorSpec,
)
from gemini.placement.gradient import SumRule
from gemini.placement.packing import ChunkFacts, Packing, packings
from gemini.settings import Settings
from sharding import ALIGNMENT, SUM_TILE_NUMEL, ShardLayout, Unit, exchange_numels, replica_numels

# -- Scratch: device memory for the temporaries of one reduction, reused by the next. Bytes only.
#
# [Note: Tiles] A reduction sends the payload and receives as much from the other ranks, which is then added up: it
# takes the memory of a second payload. Of a chunk of the chosen size that is little. Of one weight that is larger than
# a chunk, such as the stacked experts of a mixture, it may be more than a device has left. Where no placement fits
# otherwise, such payloads are exchanged in tiles: as many elements of every rank's shard at a time as scratch of
# `TILED_BYTES` has room for. A sum is made element by element, so tiles change no bit. But each tile is a collective
# that waits for the one before it, so that none of them runs beside the backward: exchanges at once are preferred
# wherever they fit.


TILED_BYTES = 512 * 2**20
"""Scratch that tiles have at least. About half of it is received: of 512 ranks half a MiB each, so that a tile takes
much longer than its launch."""

_ALIGNMENT_BYTES = 256


def round_to_alignment(num_bytes: int) -> int:
    """The bytes that a scratch tensor of `num_bytes` occupies."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def scratch_bytes(trainable: Sequence[ChunkFacts], stage: int, world_size: int) -> int:
    """The scratch bytes of the largest reduction of these chunks, each reduced at once."""
    if world_size == 1:
        return max((_rounding_bytes(chunk) for chunk in trainable), default=0)
    return max((_reduction_bytes(chunk, stage) for chunk in trainable), default=0)


def tiled_scratch_bytes(trainable: Sequence[ChunkFacts], stage: int, world_size: int) -> int:
    """The scratch bytes of the largest reduction if weights larger than a chunk are reduced in tiles.

    Other chunks are reduced at once: the chunk size bounds what they need.
    """
    if world_size == 1:
        return scratch_bytes(trainable, stage, world_size)
    return max((_tiled_bytes(chunk, stage) for chunk in trainable), default=0)


def tile_bytes(travel: Dtype, rest: Dtype, rests_whole: bool, layout: ShardLayout, numel: int) -> int:
    """The scratch bytes to exchange `numel` elements of every rank's shard as a tile.

    layout: the chunk's. They hold the send and the receive buffer, the mean, the fp32 sum that is rounded to it, the
    means of all ranks if every rank keeps the whole gradient, and what replicas need beside.
    """
    summed, all_numel = travel.summed, layout.world_size * numel
    if layout.wire is not None:
        return _encoded_tile_bytes(rest, rests_whole, layout, numel)
    pieces = [all_numel * travel.itemsize] * 2 + [numel * rest.itemsize]
    if rest != summed:
        pieces.append(numel * summed.itemsize)
    if rests_whole:
        pieces.append(all_numel * rest.itemsize)
    pieces += [each * summed.itemsize for each in replica_numels(numel, layout.num_replicas, rest != summed)]
    return sum(round_to_alignment(piece) for piece in pieces)


def _encoded_tile_bytes(rest: Dtype, rests_whole: bool, layout: ShardLayout, numel: int) -> int:
    """`tile_bytes` in a wire format, whose blocks are no multiples of an alignment: each piece may lose one."""
    rounds = rest != FLOAT32
    pieces = [count * itemsize for count, itemsize in exchange_numels(numel, layout, rounds)]
    # The payload that is encoded, in at most 4 bytes an element, and the mean.
    pieces += [layout.world_size * numel * 4, numel * rest.itemsize]
    if rests_whole:
        pieces.append(layout.world_size * numel * rest.itemsize)
    if rounds:
        pieces.append(numel * FLOAT32.itemsize)
    return sum(pieces) + _ALIGNMENT_BYTES * len(pieces)


def largest_tile(travel: Dtype, rest: Dtype, rests_whole: bool, layout: ShardLayout, num_bytes: int) -> int:
    """The most elements of every rank's shard that scratch of `num_bytes` has room to exchange at once."""
    # Shards and tiles have a multiple of `ALIGNMENT` elements, as a `ShardLayout` demands.
    smallest, next_one = (tile_bytes(travel, rest, rests_whole, layout, tiles * ALIGNMENT) for tiles in (1, 2))
    # Bytes grow linearly with the tile, in steps of `ALIGNMENT` elements.
    return (1 + (num_bytes - smallest) // (next_one - smallest)) * ALIGNMENT


def num_tiles(chunk: ChunkFacts, stage: int, num_bytes: int) -> int:
    """The exchanges that a reduction of this chunk takes with scratch of `num_bytes`: 1 if it is made at once."""
    if whole_exchange_bytes(chunk, stage) <= num_bytes:
        return 1
    dtypes, layout = chunk.dtypes, chunk.grad_layout
    tile = largest_tile(dtypes.travel, dtypes.rest, stage == 0, layout, num_bytes)
    return -(-layout.shard_numel // tile)


def across_layout(numel: int, num_groups: int) -> ShardLayout:
    """The layout of `numel` consecutive elements that ranks with one place in all groups share."""
    return ShardLayout((Unit(0, numel),), num_groups)


def num_tiles_across(chunk: ChunkFacts, rest: Dtype, num_bytes: int) -> int:
    """The exchanges in which groups take the mean of what each of them shares. rest: where it rests."""
    layout = across_layout(chunk.rest_numel, chunk.num_groups)
    return -(-chunk.optim_layout.shard_numel // largest_tile(rest, rest, False, layout, num_bytes))


def replica_tile_numel(itemsize: int, num_replicas: int, num_bytes: int) -> int:
    """The most elements of a shard that replicas exchange at once when gradients are used, in scratch of `num_bytes`.

    itemsize: of the gradient at rest. They hold a copy from the host, the sum of this group, what is received, and
    one part of the total before it is rounded. Received parts are as large as the largest of them.
    """
    summed = max(FLOAT32.itemsize, itemsize)
    pieces = 4
    free = num_bytes - pieces * _ALIGNMENT_BYTES - num_replicas * summed
    return max(1, free // (itemsize + (pieces - 1) * summed) // ALIGNMENT) * ALIGNMENT


def num_replica_tiles(layout: ShardLayout, rest: Dtype, num_bytes: int) -> int:
    """The exchanges in which replicas take the mean of a shard when gradients are used. rest: where it rests."""
    return -(-layout.shard_numel // replica_tile_numel(rest.itemsize, layout.num_replicas, num_bytes))


def whole_exchange_bytes(chunk: ChunkFacts, stage: int) -> int:
    """The scratch bytes with which the chunk's gradient is exchanged at once, on several ranks."""
    # The receive buffer, the packed units if there are several, and the reduced shard.
    dtypes, layout = chunk.dtypes, chunk.grad_layout
    traveling = layout.numel * dtypes.travel.itemsize
    pieces = [layout.shard_numel * dtypes.rest.itemsize]
    if layout.wire is None:
        pieces += [traveling, traveling if len(layout.units) > 1 else 0]
    # The gradient cast to the dtype in which it travels.
    if dtypes.travel != dtypes.weight:
        pieces.append(traveling)
    # At stage 0 the whole reduced gradient, if its dtype is not the one of the payload.
    if dtypes.rest != dtypes.weight and stage == 0:
        pieces.append(layout.numel * dtypes.rest.itemsize)
    # One tile of the sum, if the result is rounded from it.
    summed = dtypes.travel.summed
    rounds = dtypes.rest != summed
    if rounds:
        pieces.append(summed.itemsize * min(layout.shard_numel, SUM_TILE_NUMEL))
    if layout.wire is None:
        in_replicas = replica_numels(layout.shard_numel, layout.num_replicas, rounds)
        pieces += [each * summed.itemsize for each in in_replicas]
    else:
        pieces += [each * itemsize for each, itemsize in exchange_numels(layout.shard_numel, layout, rounds)]
    # Every piece begins at an aligned address, for which at most one alignment is lost.
    return sum(pieces) + _ALIGNMENT_BYTES * len(pieces)


def _reduction_bytes(chunk: ChunkFacts, stage: int) -> int:
    """The scratch bytes of one chunk's reduction at once, on several ranks."""
    return max(whole_exchange_bytes(chunk, stage), _least_for_sums(chunk, stage))


def _tiled_bytes(chunk: ChunkFacts, stage: int) -> int:
    """The scratch bytes of one chunk's reduction on several ranks, in tiles if that needs less."""
    whole = _reduction_bytes(chunk, stage)
    if not chunk.oversize:
        return whole
    dtypes = chunk.dtypes
    least = tile_bytes(dtypes.travel, dtypes.rest, stage == 0, chunk.grad_layout, ALIGNMENT)
    return min(whole, max(TILED_BYTES, least, _least_for_sums(chunk, stage)))


def _least_for_sums(chunk: ChunkFacts, stage: int) -> int:
    """A sum that no_sync() left is always exchanged in tiles, as large as scratch allows: room for the smallest."""
    dtypes = chunk.dtypes
    rest = FLOAT32 if dtypes.widens else dtypes.rest
    least = tile_bytes(dtypes.sums, rest, stage == 0, chunk.grad_layout, ALIGNMENT)
    if not chunk.in_groups:
        return least
    return max(least, tile_bytes(rest, rest, False, across_layout(chunk.rest_numel, chunk.num_groups), ALIGNMENT))


def _rounding_bytes(chunk: ChunkFacts) -> int:
    """The scratch bytes of one rank: the gradient in its resting dtype, if it has to be rounded to that."""
    return chunk.layout.numel * chunk.dtypes.rest.itemsize if chunk.dtypes.narrows else 0


# -- The memory that chunks need on one rank: bytes of each state, slots, scratch. Turns facts into a `Demand`.


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
    optim_states: Sequence[float] | None = None,
    costs: Costs = ON_THE_CPU,
    frees_gradients: bool = False,
) -> Demand:
    """The demand of these chunks.

    trained: for each weight, in the order of the chunks. kept: the states that frozen chunks still have, by chunk
    index. micro_batches: per step, whose gradients are added up. max_host_bytes: budget of the host. None: no bound.
    optim_states: how many states per element the optimizer keeps, by chunk. None: Adam's two. costs: of the device.
    frees_gradients: see `Settings`.
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
            facts = chunk, is_trained, has, stage, world_size, micro_batches, num_states
            demands[alike] = _chunk_demand(*facts, frees_gradients and is_trained)
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
        costs=costs,
        holds_sums=micro_batches > 1,
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
        chunk.fetch_layout.wire,
        chunk.secondary_layout is None,
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
    optim_states: float,
    frees_gradient: bool,
) -> ChunkDemand:
    dtypes, optim_numel = chunk.dtypes, chunk.optim_layout.shard_numel
    secondary = chunk.secondary_layout
    # A secondary shard lies behind the home, in the same memory.
    param_numel = chunk.home_layout.shard_numel + (0 if secondary is None else secondary.shard_numel)
    home_bytes = {Kind.PARAM: param_numel * dtypes.weight.itemsize}
    if frees_gradient:
        home_bytes[Kind.GRAD] = 0
    elif is_trained:
        home_bytes[Kind.GRAD] = _gradient_home_bytes(chunk, stage, micro_batches > 1)
    # A frozen chunk keeps a master that holds more than the 16-bit weights, which could not be made again from them.
    if dtypes.weight.is_half and (is_trained or Kind.MASTER in kept):
        home_bytes[Kind.MASTER] = chunk.master_itemsize * optim_numel
    if is_trained or Kind.OPTIM in kept:
        # fp64 weights have fp64 states, all others have fp32 ones.
        home_bytes[Kind.OPTIM] = round(optim_states * max(4, dtypes.weight.itemsize) * optim_numel)
    is_sharded = chunk.home_layout.world_size > 1
    may_be_on_disk = chunk.home_layout.world_size == chunk.optim_layout.world_size and not chunk.may_lend_home
    # Of its payload, with the same values: such a home may lie inside a slot.
    is_home_a_part = chunk.fetch_layout.wire is None and secondary is None
    # Where a sum is resumed, micro-batches accumulate in the gradient home itself. All others need a slot: the new
    # gradient must not overwrite the running sum.
    accumulates_at_home = SumRule.planned(world_size, dtypes).resumes and not frees_gradient
    return ChunkDemand(
        chunk.payload_bytes,
        home_bytes,
        chunk.oversize,
        needs_slot=is_sharded,
        needs_gradient_slot=not accumulates_at_home,
        may_keep_slot=is_sharded and len(chunk.layout.units) == 1 and is_home_a_part,
        is_frozen=not is_trained,
        may_be_on_disk=may_be_on_disk and secondary is None,
        frees_gradient=frees_gradient,
        persists=chunk.persists,
        numel=chunk.layout.numel,
        link=_link_bytes(chunk, stage, world_size, micro_batches, frees_gradient) if is_trained else LinkBytes(),
        updated_numel=optim_numel if is_trained else 0,
        optim_states=optim_states,
    )


def _link_bytes(chunk: ChunkFacts, stage: int, world_size: int, micro_batches: int, frees_gradient: bool) -> LinkBytes:
    """The bytes that cross the link in a step if the chunk's states rest on two tiers, as `simulate.py` counts them."""
    dtypes, numel = chunk.dtypes, chunk.optim_layout.shard_numel
    updated = dtypes.weight.itemsize * numel
    is_wide = micro_batches > 1 and dtypes.widens
    arriving = dtypes.arriving(world_size == 1)
    # At stage 0 every rank keeps the whole mean, at all other stages its own part.
    reduced = micro_batches * arriving.itemsize * (chunk.layout.numel if stage == 0 else chunk.grad_layout.shard_numel)
    if SumRule.planned(world_size, dtypes).resumes:
        # Each further micro-batch first brings the sum to the device.
        reduced += (micro_batches - 1) * updated
    return LinkBytes(
        read=0 if dtypes.weight.is_half and not chunk.splits_master else updated,
        written=updated,
        summed=numel * (FLOAT32 if is_wide else arriving if frees_gradient else dtypes.rest).itemsize,
        reduced=reduced,
        made_whole=chunk.payload_bytes if chunk.home_layout.world_size < chunk.optim_layout.world_size else 0,
    )


def holding_sums(demand: Demand, chunks: Sequence[ChunkFacts], stage: int) -> Demand:
    """`demand` of these chunks, with room for what a second backward of a step adds. Local; raises nothing."""
    if demand.holds_sums:
        return demand
    found: dict[int, ChunkDemand] = {}  # by chunk, which thousands share
    for facts, chunk in zip(chunks, demand.chunks, strict=True):
        if id(chunk) not in found:
            found[id(chunk)] = chunk
            # Where the backward uses gradients up a second one of a step is refused.
            if Kind.GRAD in chunk.home_bytes and not chunk.frees_gradient:
                home_bytes = {**chunk.home_bytes, Kind.GRAD: _gradient_home_bytes(facts, stage, holds_sums=True)}
                found[id(chunk)] = replace(chunk, home_bytes=home_bytes)
    return replace(demand, chunks=tuple(found[id(chunk)] for chunk in demand.chunks), holds_sums=True)


def _gradient_home_bytes(chunk: ChunkFacts, stage: int, holds_sums: bool) -> int:
    """Bytes of the gradient's own home. holds_sums: of several micro-batches."""
    num_bytes = _gradient_home_numel(chunk, stage, holds_sums) * chunk.dtypes.rest.itemsize
    # From the second micro-batch on the sum is kept in fp32, in addition to the 16-bit home.
    return num_bytes + (FLOAT32.itemsize * chunk.rest_numel if holds_sums and chunk.dtypes.widens else 0)


def _gradient_home_numel(chunk: ChunkFacts, stage: int, holds_sums: bool) -> int:
    """Elements of the gradient's own home: the whole payload at stages 0 and 1, else this rank's shard."""
    # The reduced gradient takes the memory of the parameters, unless another micro-batch needs these.
    if chunk.may_lend_home and not holds_sums:
        return 0
    optim_numel = chunk.rest_numel
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


# -- All packings of one model with what each asks of memory, made once for plans under any budgets and policy.
#
# Neither a packing nor its demand depends on budgets or on the policy, and both take most of the time of a plan.
# Whoever plans one model several times (`gemini plan` tries each change before it advises it) passes the same `Packed`
# along.


class Packed:
    """The packings of `spec`, each with its demand for training on an unbounded host, the cheapest first.

    A packing is made when an iteration first comes to it, and kept for the iterations after.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, world_size: int) -> None:
        """settings: all count but for the budgets and the policy."""
        self.spec = spec
        self.world_size = world_size
        self._settings = settings
        # A generator: sizes that no search comes to are never packed.
        self._unmade = packings(spec, settings, world_size)
        self._made: list[Packing] = []
        self._demanded: dict[float, list[tuple[Packing, Demand]]] = {}  # by states per element

    def __iter__(self) -> Iterator[tuple[Packing, Demand]]:
        """Iterate over `with_states` of Adam. Raises ValueError if the shard strategy loses or repeats a weight."""
        return self.with_states(OPTIM_STATES)

    def with_states(self, optim_states: float) -> Iterator[tuple[Packing, Demand]]:
        """The packings with their demands for an optimizer that keeps so many states per element. Raises likewise."""
        demanded = self._demanded.setdefault(optim_states, [])
        place = 0
        # Several iterations share these lists, and another one may have gone further, so nothing is made twice.
        while place < len(self._made) or self._makes_one_more():
            if place == len(demanded):
                packing = self._made[place]
                demanded.append((packing, self._demand_of(packing, optim_states)))
            yield demanded[place]
            place += 1

    def _makes_one_more(self) -> bool:
        packing = next(self._unmade, None)
        if packing is not None:
            self._made.append(packing)
        return packing is not None

    def _demand_of(self, packing: Packing, optim_states: float) -> Demand:
        trained, states = trained_at_first(self.spec, packing), [optim_states] * len(packing.chunks)
        # The host's budget is left out, because it is in no byte of the demand: `find_plans` adds it.
        return packing_demand(packing, self.spec, trained, {}, self._settings, self.world_size, optim_states=states)


def packing_demand(
    packing: Packing,
    spec: ModelSpec,
    trained: Sequence[bool],
    kept: Mapping[int, frozenset[Kind]],
    settings: Settings,
    world_size: int,
    max_host_bytes: int | None = None,
    micro_batches: int = 1,
    optim_states: Sequence[float] | None = None,
) -> Demand:
    """`demand_of` the chunks of `packing`. settings: all count but for the budgets and the policy."""
    # A number in the settings holds for all steps. Without one the plan counts as many micro-batches as steps have
    # shown.
    return demand_of(
        packing.chunks,
        spec,
        trained,
        kept,
        settings.stage,
        world_size,
        settings.max_live_parameters,
        micro_batches=settings.gradient_accumulation_steps or micro_batches,
        max_host_bytes=max_host_bytes,
        optim_states=optim_states,
        costs=WITH_STREAMS if settings.has_streams else ON_THE_CPU,
        frees_gradients=settings.frees_gradients(world_size),
    )


def trained_at_first(spec: ModelSpec, packing: Packing) -> list[bool]:
    """Whether each weight is trained when the model is wrapped, in the order of the chunks."""
    # `demand_of` takes the flags chunk by chunk, and packing may put weights in another order than the spec has.
    trainable = {weight.name: weight.trainable for weight in spec.weights}
    return [trainable[name] for chunk in packing.chunks for name in chunk.names]
