"""Payloads in a `WireFormat`: encoded before they travel, decoded and added up after.

[Note: Encoded in place] A payload that is gathered receives its encoded bytes at its own end, and is decoded there
from the front: a decoded block ends before the first encoded byte that is still to be read, since encoded blocks are
smaller. So a gather needs no memory beside the payload. This rank's part is encoded from the back, because it may lie
in the payload already. Work in fp32 takes memory of the payload that is free at that time. Where that is too little,
it takes some KiB that no plan counts, for `_FEW_BLOCKS` at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sharding.layout import ALIGNMENT, ShardLayout, WireFormat, round_up

_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""A block of zeros would be divided by zero, and subnormal scales have too few bits."""

_FEW_BLOCKS = 64
"""64 KiB of fp32."""

_FLOAT_BYTES = 4


def encode(wire: WireFormat, values: Tensor, encoded: Tensor, work: Tensor) -> None:
    """Set `encoded`, (num_bytes,) uint8, to `values`, 1-D of whole blocks in 16 or 32 bits, from the back.

    It may lie where values are that a later block has been read from. work: fp32, at least a block; it is overwritten.
    """
    rows, packed = values.view(-1, ALIGNMENT), encoded.view(-1, wire.block_bytes)
    step = max(1, work.numel() // ALIGNMENT)
    for end in range(len(rows), 0, -step):
        start = max(0, end - step)
        block = work[: (end - start) * ALIGNMENT].view(-1, ALIGNMENT)
        block.copy_(rows[start:end])
        _encode(wire, block, packed[start:end])


def _encode(wire: WireFormat, values: Tensor, packed: Tensor) -> None:
    low, high = torch.aminmax(values, dim=1, keepdim=True)
    scales = torch.maximum(high, low.neg_()).div_(wire.largest).clamp_(min=_LEAST_SCALE)
    values.div_(scales).round_()
    _scales_in(wire, packed).copy_(scales)
    if wire.bits == 8:
        packed[:, :ALIGNMENT].view(torch.int8).copy_(values)
        return
    # Two integers a byte, each made positive by 8: the first half of the block is in the lower bits.
    first, second = values.chunk(2, dim=1)
    packed[:, : ALIGNMENT // 2].copy_(first.add_(second, alpha=16).add_(8 * 17))


def decode(wire: WireFormat, packed: Tensor, values: Tensor) -> None:
    """Set `values`, (blocks, ALIGNMENT) fp32, to those of `packed`, (blocks, block_bytes) uint8, apart from them."""
    if wire.bits == 8:
        values.copy_(packed[:, :ALIGNMENT].view(torch.int8))
    else:
        both, (first, second) = packed[:, : ALIGNMENT // 2], values.chunk(2, dim=1)
        second.copy_(both).div_(16).floor_()
        first.copy_(both).sub_(second, alpha=16)
        values.sub_(8)
    values.mul_(_scales_in(wire, packed))


def _scales_in(wire: WireFormat, packed: Tensor) -> Tensor:
    """(blocks, 1) fp32."""
    return packed[:, wire.block_bytes - _FLOAT_BYTES :].view(torch.float32)


def shown(wire: WireFormat, values: Tensor) -> Tensor:
    """A copy of `values`, 1-D and from the start of a block on, as all ranks get them."""
    numel = values.numel()
    padded = values.new_zeros(round_up(numel, ALIGNMENT))
    padded[:numel].copy_(values)
    packed = torch.empty(wire.num_bytes(padded.numel()), dtype=torch.uint8, device=values.device)
    work = torch.empty(padded.numel(), dtype=torch.float32, device=values.device)
    if numel:
        encode(wire, padded, packed, work)
        decode(wire, packed.view(-1, wire.block_bytes), work.view(-1, ALIGNMENT))
    return work[:numel].to(values.dtype)


def as_received(layout: ShardLayout, values: Tensor) -> Tensor:
    """`values`, 1-D and from the start of a block on, as all ranks get them in this layout. It may be `values`."""
    return values if layout.wire is None else shown(layout.wire, values)


# -- A payload that is gathered. See [Note: Encoded in place].


def encoded_part(payload: Tensor, layout: ShardLayout) -> Tensor:
    """(encoded.numel,) uint8: the end of the payload, where its encoded bytes are received."""
    num_bytes = layout.encoded.numel
    return payload[: layout.numel].view(torch.uint8)[layout.numel * payload.itemsize - num_bytes :]


def encode_own(payload: Tensor, shard: Tensor | None, layout: ShardLayout, rank: int, encoded: Tensor) -> None:
    """Encode this rank's slices, which lie in the payload or in `shard`, to their places in `encoded`."""
    assert layout.wire is not None
    work = _free_work(payload, layout, rank)
    places = zip(layout.slices(rank), layout.encoded.slices(rank), strict=True)
    for piece, place in reversed(list(places)):
        if piece.numel:
            values = payload[piece.in_payload] if shard is None else shard[piece.in_shard]
            encode(layout.wire, values, encoded[place.in_payload], work)


def _free_work(payload: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """fp32 memory outside of this rank's slices and of the place where they are encoded."""
    encoded = layout.encoded
    own = [piece for piece in layout.slices(rank) if piece.numel]
    memory = payload[: layout.numel].view(torch.uint8)
    if rank and own:
        # The first rank's first slice, as far as nothing is received there.
        memory = memory[: min(own[0].numel * payload.itemsize, memory.numel() - encoded.numel)]
    elif own:
        # The end, which belongs to the last rank, and in which its last slice is received.
        memory = memory[memory.numel() - [piece.numel for piece in encoded.slices(rank) if piece.numel][-1] :]
    numel = memory.numel() // _FLOAT_BYTES // ALIGNMENT * ALIGNMENT
    if numel < _FEW_BLOCKS * ALIGNMENT:
        return torch.empty(_FEW_BLOCKS * ALIGNMENT, dtype=torch.float32, device=payload.device)
    return memory[: numel * _FLOAT_BYTES].view(torch.float32)


def decode_in_place(payload: Tensor, layout: ShardLayout) -> None:
    """Fill the payload from its encoded bytes, which are at its end."""
    wire = layout.wire
    assert wire is not None
    memory, rows = payload[: layout.numel].view(torch.uint8), payload[: layout.numel].view(-1, ALIGNMENT)
    packed = encoded_part(payload, layout).view(-1, wire.block_bytes)
    row_bytes, is_float = ALIGNMENT * payload.itemsize, payload.dtype is torch.float32
    work_bytes = 0 if is_float else ALIGNMENT * _FLOAT_BYTES
    start, total = 0, len(rows)
    while start < total:
        left = total - start
        # Between what is decoded and what is still to be read there are so many bytes a block that is left.
        count = (row_bytes - wire.block_bytes) * left // (row_bytes + work_bytes)
        block = packed[start : start + count]
        first = row_bytes * (start + count)  # of the memory behind the decoded blocks
        if count < _FEW_BLOCKS:
            count = min(_FEW_BLOCKS, left)
            block = packed[start : start + count].clone()
            work = rows.new_empty(count * ALIGNMENT, dtype=torch.float32)
        else:
            work = memory[first : first + count * work_bytes].view(torch.float32)
        target = rows[start : start + count]
        values = target if is_float else work.view(-1, ALIGNMENT)
        decode(wire, block, values)
        if not is_float:
            target.copy_(values)
        start += count


# -- A payload whose slices are exchanged and added up.


def encode_by_rank(payload: Tensor, layout: ShardLayout, encoded: Tensor, work: Tensor) -> None:
    """Set `encoded`, (encoded.numel,) uint8, to [shard of rank 0 | shard of rank 1 | ...] of the payload."""
    assert layout.wire is not None
    by_rank = encoded.view(layout.world_size, -1)
    for rank in range(layout.world_size):
        for piece, place in zip(layout.slices(rank), layout.encoded.slices(rank), strict=True):
            if piece.numel:
                encode(layout.wire, payload[piece.in_payload], by_rank[rank, place.in_shard], work)


def decode_to(wire: WireFormat, encoded: Tensor, out: Tensor, work: Tensor) -> None:
    """Set `out`, 1-D of whole blocks and of any float dtype, to what `encoded` holds, apart from it."""
    rows, packed = out.view(-1, ALIGNMENT), encoded.view(-1, wire.block_bytes)
    step = max(1, work.numel() // ALIGNMENT)
    for start in range(0, len(rows), step):
        target = rows[start : start + step]
        values = work[: target.numel()].view(-1, ALIGNMENT)
        decode(wire, packed[start : start + step], values)
        target.copy_(values)


def sum_encoded(wire: WireFormat, rows: Tensor, out: Tensor, divisor: int, work: Tensor, total: Tensor | None) -> None:
    """Set out = (rows[0] + rows[1] + ...) / divisor, decoded, and added in this order in fp32.

    rows: (ranks, num_bytes of out) uint8. work: fp32, at least a block. total: as large, where `out` is not fp32.
    """
    packed = rows.view(len(rows), -1, wire.block_bytes)
    number = torch.full((), divisor, dtype=torch.float32, device=rows.device)  # as in `sum_rows`
    step = max(1, work.numel() // ALIGNMENT)
    targets = out.view(-1, ALIGNMENT)
    for start in range(0, len(targets), step):
        target = targets[start : start + step]
        sums = target if total is None else total[: target.numel()].view(-1, ALIGNMENT)
        values = work[: target.numel()].view(-1, ALIGNMENT)
        for place, row in enumerate(packed[:, start : start + step]):
            decode(wire, row, values if place else sums)
            if place:
                sums.add_(values)
        if divisor != 1:
            sums.div_(number)
        if total is not None:
            target.copy_(sums)
