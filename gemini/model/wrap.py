"""From a module to chunks: pack its parameters, and say what they ask of memory. Nothing is allocated here."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from gemini.chunks.chunk import Chunk, ManagedParameter, one_rank
from gemini.chunks.placeholder import dense_stride, expanded, placeholder
from gemini.executor.unsynced import smallest_sum_bytes
from gemini.model.operators import FoundOperator
from gemini.model.precision import ModulePrecision
from gemini.placement.demand import OPTIM_STATES, ChunkDemand, Demand, Kind, Placement
from gemini.placement.packing import PackedChunk, PackingInput
from gemini.settings import Settings, dtype_of, torch_dtype
from optim import HALF_DTYPES
from sharding import SUM_TILE_NUMEL, ParameterSpec


def packing_inputs(
    operators: list[FoundOperator], by_name: dict[str, nn.Parameter], precision: ModulePrecision
) -> list[list[PackingInput]]:
    """Every distinct parameter at its first operator."""
    names = {parameter: name for name, parameter in by_name.items()}
    taken: set[nn.Parameter] = set()  # membership only
    inputs: list[list[PackingInput]] = []
    for operator in operators:
        mine = [p for p in operator.parameters if p not in taken]
        taken.update(mine)
        row = []
        for parameter in dict.fromkeys(mine):
            kind = precision.parameters[parameter]
            spec = ParameterSpec(names[parameter], parameter.numel(), tuple(parameter.shape))
            row.append(PackingInput(spec, (str(kind), parameter.requires_grad), kind.itemsize))
        inputs.append(row)
    return inputs


def describe(arguments: Sequence[str], inputs: list[list[PackingInput]], built: list[str], compiled: list[str]) -> str:
    """What ranks must have in common, one line each, so that an error can show the first that differs."""
    parameters = [
        f"parameter {each.spec.name!r} of shape {each.spec.shape}, (dtype, trainable) = {each.key}"
        for row in inputs
        for each in row
    ]
    made = [f"built in a ZeroInitContext: {', '.join(built) or 'nothing'}"]
    return "\n".join([*arguments, *parameters, *made, f"compiled: {', '.join(compiled) or 'nothing'}"])


def make_chunks(
    packed_chunks: Sequence[PackedChunk],
    by_name: dict[str, nn.Parameter],
    operators: list[FoundOperator],
    settings: Settings,
    weights: ModulePrecision,
    device: torch.device,
    rank: int,
) -> list[Chunk]:
    """Chunks and their parameters' places; no memory yet but the placeholders' few bytes."""
    first_operator: dict[nn.Parameter, int] = {}
    for place, operator in enumerate(operators):
        for parameter in operator.parameters:
            first_operator.setdefault(parameter, place + 1)  # 0 is the model itself
    chosen = {parameter for operator in operators if operator.is_chosen for parameter in operator.parameters}
    # embeddings that renormalise rows in their forward: what a split master cannot see
    edited = {p for o in operators if getattr(o.module, "max_norm", None) is not None for p in o.parameters}
    chunks = []
    empties: dict[torch.dtype, torch.Tensor] = {}
    index = 0
    for number, packed in enumerate(packed_chunks):
        some = by_name[packed.names[0]]
        kind = weights.parameters[some]
        whole = one_rank(packed.layout)
        dtypes, stage = settings.chunk_dtypes(dtype_of(kind)), settings.stage
        rest = torch_dtype(dtypes.rest)
        chunk = Chunk(
            index=number,
            dtype=kind,
            trainable=some.requires_grad,
            layout=packed.layout,
            oversize=packed.oversize,
            rank=rank,
            home_layout=packed.layout if stage == 3 else whole,
            optim_layout=packed.layout if stage >= 1 else whole,
            travel_dtype=torch_dtype(dtypes.travel),
            gradient_dtype=rest,
            sum_dtype=torch_dtype(dtypes.sums),
            widens=dtypes.widens,
        )
        # what this rank steps must be one run in its parameter home: whole weights of several units are not that
        one_run = chunk.home_layout.world_size == chunk.optim_layout.world_size or len(packed.layout.units) == 1
        half = kind in HALF_DTYPES and rest is kind
        chunk.lends_home = settings.reuse_fp16_shard and half and one_run
        empty = empties.get(kind)
        if empty is None:
            empty = empties[kind] = placeholder(kind, device)
        for name, offset in zip(packed.names, packed.offsets, strict=True):
            parameter = by_name[name]
            chunk.parameters.append(
                ManagedParameter(
                    index,
                    name,
                    parameter,
                    chunk,
                    len(chunk.parameters),
                    offset,
                    parameter.shape,
                    dense_stride(parameter),
                    expanded(empty, parameter.shape),
                    parameter.requires_grad,
                    first_operator[parameter],
                    has_fractions=some.requires_grad and kind in HALF_DTYPES and parameter.dtype is not kind,
                )
            )
            index += 1
        itself = any(managed.parameter in edited for managed in chunk.parameters)
        chunk.splits_master = kind is torch.bfloat16 and not chunk.lends_home and not itself
        chunk.is_chosen = any(managed.parameter in chosen for managed in chunk.parameters)
        chunks.append(chunk)
    return chunks


def demand_of(chunks: list[Chunk], operators: list[FoundOperator], stage: int, world_size: int) -> Demand:
    """What the chunks ask of memory on this rank."""
    demands = []
    for chunk in chunks:
        itemsize = chunk.dtype.itemsize
        home_bytes = {Kind.PARAM: chunk.home_layout.shard_numel * itemsize}
        if chunk.trainable:
            home_bytes[Kind.GRAD] = gradient_home_numel(chunk, stage) * chunk.gradient_dtype.itemsize
        if chunk.dtype in HALF_DTYPES and (chunk.trainable or Kind.MASTER in chunk.kept):
            home_bytes[Kind.MASTER] = (2 if chunk.splits_master else 4) * chunk.optim_numel
        if chunk.trainable or Kind.OPTIM in chunk.kept:
            home_bytes[Kind.OPTIM] = OPTIM_STATES * max(4, itemsize) * chunk.optim_numel
        sharded = chunk.home_layout.world_size > 1
        # one rank adds micro-batches up in a whole home; others, and 16-bit sums, take them in beside what is there
        needs_gradient_slot = world_size > 1 or chunk.dtype in HALF_DTYPES or chunk.gradient_dtype is not chunk.dtype
        may_keep = sharded and len(chunk.layout.units) == 1
        demands.append(
            ChunkDemand(
                chunk.payload_bytes,
                home_bytes,
                chunk.oversize,
                needs_slot=sharded,
                needs_gradient_slot=needs_gradient_slot,
                may_keep_slot=may_keep,
                is_frozen=not chunk.trainable,
            )
        )
    slot_bytes = _largest(chunks), _largest(chunks, oversize=True)
    trainable = [chunk for chunk in chunks if chunk.trainable]
    gradient_bytes = _largest(trainable), _largest(trainable, oversize=True)
    return Demand(
        tuple(demands),
        slot_bytes,
        min_slots(chunks, operators),
        gradient_bytes,
        (2, 1),  # or as many as there are users: a chunk without elements is one
        scratch_bytes(trainable, stage) if world_size > 1 else rounding_bytes(trainable),
    )


def gradient_home_numel(chunk: Chunk, stage: int) -> int:
    """Elements of a gradient's own home: whole at stages 0 and 1, else this rank's shard; none in a shared one."""
    if chunk.lends_home:
        return 0
    if stage >= 2 or chunk.layout.world_size == 1 or chunk.gradient_dtype is not chunk.dtype:
        return chunk.optim_numel
    several_units = stage == 1 and len(chunk.layout.units) > 1
    return chunk.numel + (chunk.optim_numel if several_units else 0)


def scratch_bytes(trainable: list[Chunk], stage: int) -> int:
    """Of the largest reduction: casts, the exchange, packed units, the result, and a tile of its sum."""
    largest = 0
    for chunk in trainable:
        travel, rest = chunk.travel_dtype, chunk.gradient_dtype
        traveling = chunk.numel * travel.itemsize
        several = len(chunk.layout.units) > 1
        pieces = [traveling, traveling if several else 0, chunk.layout.shard_numel * rest.itemsize]
        if travel is not chunk.dtype:
            pieces.append(traveling)
        if rest is not chunk.dtype and stage == 0:
            pieces.append(chunk.numel * rest.itemsize)
        summed = torch.float32 if travel in HALF_DTYPES else travel
        if rest is not summed:
            pieces.append(summed.itemsize * min(chunk.layout.shard_numel, SUM_TILE_NUMEL))
        largest = max(largest, sum(pieces) + 256 * len(pieces), smallest_sum_bytes(chunk, stage))
    return largest


def rounding_bytes(trainable: list[Chunk]) -> int:
    """On one rank: a gradient in the dtype in which it rests, where that is not as wide as the gradient's own."""
    return max((chunk.numel * chunk.gradient_dtype.itemsize for chunk in trainable if chunk.narrows), default=0)


def _largest(chunks: list[Chunk], oversize: bool = False) -> int:
    return max((chunk.payload_bytes for chunk in chunks if chunk.oversize is oversize), default=0)


def min_slots(chunks: list[Chunk], operators: list[FoundOperator]) -> tuple[int, int]:
    """Slots of both sizes that the busiest moment needs before there is a trace.

    The largest union of the chunks of all operators on one path of the module tree, and one more where there are
    enough chunks: a recomputation inside a node, or a function that borrows a parameter, holds one beside them.
    """
    chunk_of = {managed.parameter: chunk for chunk in chunks for managed in chunk.parameters}
    need, now = [0, 0], [0, 0]  # by size; now: of the path that ends at the operator at hand
    users: Counter[int] = Counter()  # chunk -> operators on the path that use it
    path: list[list[Chunk]] = []
    for operator in operators:  # parents come before their children, so a path grows and shrinks at its end
        while len(path) > len(operator.ancestors):
            for chunk in path.pop():
                users[chunk.index] -= 1
                now[chunk.oversize] -= not users[chunk.index]
        path.append(list(dict.fromkeys(chunk_of[parameter] for parameter in operator.parameters)))
        for chunk in path[-1]:
            now[chunk.oversize] += not users[chunk.index]
            users[chunk.index] += 1
        need = [max(pair) for pair in zip(need, now, strict=True)]
    totals = [sum(chunk.oversize is oversize for chunk in chunks) for oversize in (False, True)]
    return min(need[0] + 1, totals[0]), min(need[1], totals[1])


def plan_hash(packed_chunks: tuple[PackedChunk, ...], placement: Placement, extra: str) -> int:
    """32 bits of all that decides the order of collectives."""
    decided = packed_chunks, placement.num_slots, placement.homes, sorted(placement.kept), extra
    return zlib.crc32(repr(decided).encode())
