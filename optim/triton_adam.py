"""Adam in the written order as one Triton kernel over a list of pieces (see `optim.reference` and `optim.piece`).

The kernel reads the addresses of the pieces from a table of pointers, so that a list costs one launch. It is compiled
without contraction and with correctly rounded roots and divisions, so it gives the reference's bits. Operations that
the reference leaves out are left out here by compile-time flags.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import TypeAlias

import torch
import triton
import triton.language as tl

from optim.master import BF16_NAN_BITS
from optim.piece import BLOCK, AdamPiece, AdamScalars
from optim.reference import PLACE_FACTOR, TENTH, dynamic_map

BLOCK_NUMEL = 1024
"""Elements of one program: four per thread, 16 bytes of fp32. With eight, Triton gives 16-bit tensors another layout,
and threads exchange their elements through shared memory."""
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""Compiler options: eight warps of 32 threads, and no multiplication contracted with an addition."""
ALIGNMENT_BYTES = 16
"""Alignment that all pointers need for the widest loads. Views at other addresses use narrower ones."""

# Of the table: first block, numel, the pointers of an AdamPiece's tensors, those of the scales of its moments, and key
# and first place of its random numbers.
_COLUMNS = tl.constexpr(11)
_NAN_BITS = tl.constexpr(BF16_NAN_BITS)

_MOMENT_BLOCK = tl.constexpr(BLOCK)
_MAP_NUMEL = tl.constexpr(256 + 8 + 7 + 7 + 2)  # of `_maps`
_NUM_DECADES = tl.constexpr(7)
_TENTH = tl.constexpr(TENTH)
_PLACE_FACTOR = tl.constexpr(PLACE_FACTOR)
_LARGEST_PLACE = tl.constexpr(2.0 - 2.0**-23)

# The gradient's dtype, the layout, the moments' dtype, and whether these are rounded stochastically.
_Variant: TypeAlias = tuple[torch.dtype, str, torch.dtype, bool]

# bf16 is read as its bits, the upper half of an fp32
_GRAD_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.int16, torch.float16: tl.float16}
_MOMENT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.int16, torch.uint8: tl.uint8}


def update(pieces: Sequence[AdamPiece], scalars: AdamScalars, absorbs: bool = False) -> None:
    """One Adam update of checked pieces, all on one CUDA device: one launch per (gradient dtype, layout) among them.

    absorbs: masters first take over elements of their 16-bit copies that are not the rounded master.

    The usual list is uniform and takes one. The host waits for nothing: the work is queued on the current stream, on
    which the pieces must be ready. Autograd does not see what is written. Raises ValueError for pieces on several
    devices, before anything is written.
    """
    groups: dict[_Variant, list[AdamPiece]] = {}
    for piece in pieces:
        if piece.weight.device != pieces[0].weight.device:
            raise ValueError(f"pieces must be on one device: {pieces[0].weight.device} and {piece.weight.device}")
        if piece.weight.numel():
            kind = piece.grad.dtype, piece.layout, piece.exp_avg.dtype, piece.draws is not None
            groups.setdefault(kind, []).append(piece)
    # A variant is compiled into the kernel, so pieces of different variants cannot share a launch.
    for variant, group in groups.items():
        _launch(group, variant, scalars, absorbs)


@cache
def _maps(device: torch.device) -> torch.Tensor:
    """(2, 280) fp32: of each map of 8-bit moments the entries, borders, powers, sizes, first and top."""
    maps = [dynamic_map(is_signed) for is_signed in (True, False)]
    rows = [(*its.entries.tolist(), *its.borders, *its.powers, *its.sizes, its.first, its.top) for its in maps]
    return torch.tensor(rows, dtype=torch.float32, device="cpu").to(device)


def flags(scalars: AdamScalars) -> dict[str, bool]:
    """The kernel's compile-time flags: which operations an update has."""
    return {
        "HAS_SCALE": scalars.grad_scale != 1.0,
        "HAS_CLIP": scalars.clip != 1.0,
        "HAS_L2": scalars.l2 != 0.0,
        "HAS_ROOT_BIAS": scalars.root_bias2 != 1.0,
        "HAS_DECAY": scalars.decay != 0.0,
    }


def _launch(pieces: Sequence[AdamPiece], variant: _Variant, scalars: AdamScalars, absorbs: bool) -> None:
    """Launch the kernel for pieces of one variant, none of them empty."""
    rows, num_blocks, pointer_bits = [], 0, 0
    for piece in pieces:
        tensors = (*piece[:4], piece.remainder if piece.half is None else piece.half)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        sizes = [0 if tensor is None else tensor.itemsize for tensor in tensors]
        scales = [0 if its is None else its.data_ptr() for its in (piece.exp_avg_scale, piece.exp_avg_sq_scale)]
        key, first = piece.draws or (0, 0)
        for start, numel in ((0, piece.weight.numel()),) if piece.spans is None else piece.spans:
            shifted = [pointer + start * size for pointer, size in zip(pointers, sizes, strict=True)]
            draws = _signed(key), first + start
            rows.append((num_blocks, numel, *shifted, *(each + start // BLOCK * 4 for each in scales), *draws))
            num_blocks += -(-numel // BLOCK_NUMEL)
            for pointer in shifted:
                # A low bit that is set in one pointer is set in the union, which is thus aligned only if all pointers
                # are.
                pointer_bits |= pointer
    grad_dtype, its_layout, moment_dtype, is_drawn = variant
    device = pieces[0].weight.device
    on_gpu = device.type == "cuda"  # else the interpreter's
    # Pinned, so that the copy waits for nothing; torch keeps the memory until the copy is done.
    table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=on_gpu).to(device, non_blocking=True)
    # Triton launches on the thread's current device, whatever device the pointers are of.
    with torch.cuda.device(device) if on_gpu else nullcontext():
        adam_kernel[(num_blocks,)](
            table,
            len(rows),
            _maps(device),
            *scalars,
            GRAD_DTYPE=_GRAD_DTYPES[grad_dtype],
            MOMENT_DTYPE=_MOMENT_DTYPES[moment_dtype],
            IS_DRAWN=is_drawn,
            LAYOUT=its_layout,
            **flags(scalars),
            ABSORBS=absorbs,
            ALIGNED=pointer_bits % ALIGNMENT_BYTES == 0,
            BLOCK=BLOCK_NUMEL,
            **OPTIONS,
        )


def _signed(key: int) -> int:
    """The int64 that has the bits of an unsigned number."""
    return key - 2**64 if key >= 2**63 else key


# Triton would compile the kernel once more for a list of one piece, and for lengths that 16 divides.
@triton.jit(do_not_specialize=["num_pieces"])
def adam_kernel(
    table: tl.tensor,  # (num_pieces, 11) int64
    num_pieces: tl.tensor,
    maps: tl.tensor,  # (2, 280), see `_maps`
    grad_scale: tl.tensor,
    clip: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    root_bias2: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    l2: tl.tensor,
    decay: tl.tensor,
    GRAD_DTYPE: tl.constexpr,
    MOMENT_DTYPE: tl.constexpr,
    IS_DRAWN: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    HAS_L2: tl.constexpr,
    HAS_ROOT_BIAS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    ABSORBS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update one block of the piece that contains it. The scalars are those of `AdamScalars`, fp32."""
    block = tl.program_id(0)
    # One grid covers the blocks of all pieces, so each program looks up which piece its block is of.
    row = _row_of_block(table, num_pieces, block)
    start = (block - tl.load(row)) * BLOCK  # int64: a piece may pass 2**31 elements
    numel = tl.load(row + 1) - start
    # bf16 is loaded and stored as its bits: rounding half up and joining with a remainder work on integers.
    MASTER_DTYPE: tl.constexpr = tl.int16 if LAYOUT == "split" else tl.float32
    EXTRA_DTYPE: tl.constexpr = tl.float16 if LAYOUT == "whole, fp16" else tl.int16
    weights = _pointer(row + 2, MASTER_DTYPE, ALIGNED) + start
    grads = _pointer(row + 3, GRAD_DTYPE, ALIGNED) + start
    exp_avgs = _pointer(row + 4, MOMENT_DTYPE, ALIGNED) + start
    exp_avg_sqs = _pointer(row + 5, MOMENT_DTYPE, ALIGNED) + start
    extras = _pointer(row + 6, EXTRA_DTYPE, ALIGNED) + start

    i = tl.arange(0, BLOCK)
    # A mask of unknown length would narrow the loads, so only the last block of a piece has a mask.
    if numel >= BLOCK:
        p, g, m, v = _load(weights, grads, exp_avgs, exp_avg_sqs, extras, i, None, LAYOUT, ABSORBS)
    else:
        p, g, m, v = _load(weights, grads, exp_avgs, exp_avg_sqs, extras, i, i < numel, LAYOUT, ABSORBS)
    if tl.uint8 == MOMENT_DTYPE:
        # A program has whole blocks of moments, but for the last one of a piece.
        ROWS: tl.constexpr = BLOCK // _MOMENT_BLOCK
        which = start // _MOMENT_BLOCK + tl.arange(0, ROWS)
        is_there = tl.arange(0, ROWS) * _MOMENT_BLOCK < numel
        first_scales = tl.load(row + 7).to(tl.pointer_type(tl.float32)) + which
        second_scales = tl.load(row + 8).to(tl.pointer_type(tl.float32)) + which
        m = _of_bytes(m, tl.load(first_scales, mask=is_there, other=0.0), maps, i < numel, ROWS)
        v = _of_bytes(v, tl.load(second_scales, mask=is_there, other=0.0), maps + _MAP_NUMEL, i < numel, ROWS)
    elif tl.int16 == MOMENT_DTYPE:
        m = (m.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        v = (v.to(tl.int32) << 16).to(tl.float32, bitcast=True)

    if HAS_SCALE:
        g = g * grad_scale
    if HAS_CLIP:
        g = g * clip
    if HAS_L2:
        g = g + p * l2
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * one_minus_beta2) * g
    # `tl.sqrt` and `/` would compile to PTX's approximate root and division, which have other bits.
    d = tl.sqrt_rn(v)
    if HAS_ROOT_BIAS:
        d = tl.div_rn(d, root_bias2)
    d = d + eps
    if HAS_DECAY:
        p = p - p * decay
    p = p - tl.div_rn(m * step_size, d)

    if tl.uint8 == MOMENT_DTYPE:
        # Elements of which a moment is not finite lose both: their block has a scale without them.
        is_kept = (i < numel) & _is_finite(m) & _is_finite(v)
        m, scales = _to_bytes(tl.where(is_kept, m, 0.0), maps, True, ROWS, BLOCK)
        tl.store(first_scales, scales, mask=is_there)
        v, scales = _to_bytes(tl.where(is_kept, v, 0.0), maps + _MAP_NUMEL, False, ROWS, BLOCK)
        tl.store(second_scales, scales, mask=is_there)
    elif tl.int16 == MOMENT_DTYPE:
        if IS_DRAWN:
            number = _draws(tl.load(row + 9), (tl.load(row + 10) + start + i).to(tl.uint32))
            m = _drawn_bits(m, number & 0xFFFF).to(tl.int16)
            v = _drawn_bits(v, number >> 16).to(tl.int16)
        else:
            m = _even_bits(m).to(tl.int16)
            v = _even_bits(v).to(tl.int16)
    if numel >= BLOCK:
        _store(weights, exp_avgs, exp_avg_sqs, extras, i, None, p, m, v, LAYOUT)
    else:
        _store(weights, exp_avgs, exp_avg_sqs, extras, i, i < numel, p, m, v, LAYOUT)


@triton.jit
def _row_of_block(table: tl.tensor, num_pieces: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Pointer to the last row whose first block is not behind `block`."""
    low = 0
    high = num_pieces
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(table + middle * _COLUMNS) <= block:
            low = middle
        else:
            high = middle
    return table + low * _COLUMNS


@triton.jit
def _pointer(cell: tl.tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    pointer = tl.load(cell).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # The compiler cannot know the alignment of a pointer that was loaded from memory, and would not vectorise its
        # loads.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(
    weights: tl.tensor,
    grads: tl.tensor,
    exp_avgs: tl.tensor,
    exp_avg_sqs: tl.tensor,
    extras: tl.tensor,
    i: tl.tensor,
    mask: tl.tensor,
    LAYOUT: tl.constexpr,
    ABSORBS: tl.constexpr,
) -> tl.tensor:
    """Load master and gradient as fp32, and moments as they are stored."""
    p = tl.load(weights + i, mask=mask)
    if LAYOUT == "split":
        # As in `optim.master`, the extended sign of the int16 is pushed out by the shift.
        high = p.to(tl.int32)
        low = tl.load(extras + i, mask=mask).to(tl.int32)
        low = tl.where((high & 0x7FFF) == 0, tl.maximum(low, 0), low)  # see `optim.master`
        bits = (high << 16) + low
        p = bits.to(tl.float32, bitcast=True)
    if ABSORBS:
        if LAYOUT == "whole, bf16":
            half = tl.load(extras + i, mask=mask).to(tl.int32)
            edited = _rounded_bits(p).to(tl.int16) != half.to(tl.int16)
            p = tl.where(edited, (half << 16).to(tl.float32, bitcast=True), p)
        elif LAYOUT == "whole, fp16":
            half = tl.load(extras + i, mask=mask)
            edited = p.to(tl.float16).to(tl.int16, bitcast=True) != half.to(tl.int16, bitcast=True)
            p = tl.where(edited, half.to(tl.float32), p)
    g = tl.load(grads + i, mask=mask)
    if g.dtype == tl.int16:
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        g = g.to(tl.float32)
    return p, g, tl.load(exp_avgs + i, mask=mask), tl.load(exp_avg_sqs + i, mask=mask)


@triton.jit
def _rounded_bits(p: tl.tensor) -> tl.tensor:
    """The bits of fp32 values as bf16, half up, see `optim.master`; int32."""
    return tl.where(p != p, _NAN_BITS, (p.to(tl.int32, bitcast=True) + 0x8000) >> 16)


@triton.jit
def _even_bits(x: tl.tensor) -> tl.tensor:
    """The bits of fp32 values as bf16, to nearest even; int32."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN_BITS, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@triton.jit
def _draws(key: tl.tensor, place: tl.tensor) -> tl.tensor:
    """32 random bits, uint32: `draws_of` of optim/reference.py."""
    return _mixed(_mixed(place ^ key.to(tl.uint32)) + (key >> 32).to(tl.uint32))


@triton.jit
def _mixed(h: tl.tensor) -> tl.tensor:
    h = (h ^ (h >> 16)) * tl.full(h.shape, 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full(h.shape, 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def _drawn_bits(x: tl.tensor, number: tl.tensor) -> tl.tensor:
    """The bits of fp32 values as bf16, rounded up where 16 random bits carry; int32."""
    bits = (x.to(tl.uint32, bitcast=True) + number) >> 16
    return tl.where(x != x, _NAN_BITS, bits.to(tl.int32))


@triton.jit
def _is_finite(x: tl.tensor) -> tl.tensor:
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _of_bytes(codes: tl.tensor, scales: tl.tensor, its: tl.tensor, mask: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """What bytes mean: `dequantize_` of optim/reference.py, for ROWS blocks."""
    # Addresses behind the mask's end would be any.
    entries = tl.load(its + tl.where(mask, codes, 0).to(tl.int32))
    blocks = tl.reshape(entries, (ROWS, _MOMENT_BLOCK)) * scales[:, None]
    return tl.reshape(blocks, (ROWS * _MOMENT_BLOCK,))


@triton.jit
def _to_bytes(
    x: tl.tensor, its: tl.tensor, IS_SIGNED: tl.constexpr, ROWS: tl.constexpr, NUMEL: tl.constexpr
) -> tl.tensor:
    """Bytes, (NUMEL,), and scales, (ROWS,): `quantize_` of optim/reference.py, of finite values."""
    blocks = tl.reshape(x, (ROWS, _MOMENT_BLOCK))
    bits = blocks.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    largest = tl.max(magnitudes, axis=1)
    is_positive = tl.max(((magnitudes == largest[:, None]) & (bits >= 0)).to(tl.int32), axis=1)
    size = largest.to(tl.float32, bitcast=True)
    scales = tl.where((is_positive != 0) | (largest == 0), size, -size)
    factor = tl.where(size < 2.0**-64, 2.0**64, 1.0)
    divisor = tl.where(largest == 0, 1.0, scales * factor)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), divisor)
    values = (blocks * factor[:, None]) * inverse[:, None]
    y = values
    if IS_SIGNED:
        y = tl.abs(values)
    # The columns of a map: entries, borders, powers, sizes, first, top.
    power = tl.full((ROWS, _MOMENT_BLOCK), 0.0, tl.float32) + tl.load(its + 264)
    width = tl.full((ROWS, _MOMENT_BLOCK), 0.0, tl.float32) + tl.load(its + 271)
    for number in tl.static_range(1, _NUM_DECADES):
        is_above = y > tl.load(its + 256 + number)
        power = tl.where(is_above, tl.load(its + 264 + number), power)
        width = tl.where(is_above, tl.load(its + 271 + number), width)
    place = (y * power - _TENTH) * _PLACE_FACTOR + 1.0
    place = tl.where(place > 1.0, place, 1.0)
    place = tl.where(place < _LARGEST_PLACE, place, _LARGEST_PLACE)
    index = (place * width).to(tl.int32) - tl.load(its + 278).to(tl.int32)
    index = tl.where(y > tl.load(its + 256), index, 0)
    index = tl.where(y > tl.load(its + 263), tl.load(its + 279).to(tl.int32), index)
    if IS_SIGNED:
        index = tl.where(values < 0.0, tl.maximum(127 - index, 0), 127 + index) ^ 127
    return tl.reshape(index, (NUMEL,)).to(tl.uint8), scales


@triton.jit
def _store(
    weights: tl.tensor,
    exp_avgs: tl.tensor,
    exp_avg_sqs: tl.tensor,
    extras: tl.tensor,
    i: tl.tensor,
    mask: tl.tensor,
    p: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    LAYOUT: tl.constexpr,
) -> None:
    tl.store(exp_avgs + i, m, mask=mask)
    tl.store(exp_avg_sqs + i, v, mask=mask)
    if LAYOUT == "split" or LAYOUT == "whole, bf16":
        high = _rounded_bits(p)
        if LAYOUT == "split":
            low = p.to(tl.int32, bitcast=True) - (high << 16)
            tl.store(weights + i, high.to(tl.int16), mask=mask)
            tl.store(extras + i, tl.where(p != p, 0, low).to(tl.int16), mask=mask)
        else:
            tl.store(weights + i, p, mask=mask)
            tl.store(extras + i, high.to(tl.int16), mask=mask)
    else:
        tl.store(weights + i, p, mask=mask)
        if LAYOUT == "whole, fp16":
            tl.store(extras + i, p.to(tl.float16), mask=mask)
