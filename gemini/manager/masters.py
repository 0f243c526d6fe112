"""The fp32 masters of 16-bit chunks on this rank, in either layout.

*Whole*: the MASTER home holds fp32 values. *Split* (bf16): it holds int16 remainders, and the master's upper half is
the parameter home itself (`optim.split`). Elements are numbered as in the optimizer's flat tensors, up to
`optim_numel`.

[Note: Edits of split masters] When a weight is edited its remainder becomes zero. The values from before tell which
elements were edited. The home still has them unless it is the payload; then a copy is made before a write is possible
(`snapshots.py`). A write to a weight inside its own operator is noticed only afterwards: the whole parameter loses its
remainders, and a warning says so. Embeddings with `max_norm`, which write so in every forward, have whole masters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.memory.region import Region
from gemini.memory.transfer import ready
from gemini.placement.demand import Kind
from optim import HALF_DTYPES, absorb_edits_, join_master_, round_master_, split_master_
from sharding import pieces_within


def full_precision(chunk: Chunk, start: int, numel: int) -> Tensor:
    """(numel,) elements of the master from `start` on, on its tier; of the weights if there is no master.

    fp32, or fp64 for fp64 weights. It may be a view.
    """
    return master_in(chunk, [ready(region) for region in regions_of_master(chunk)], start, numel)


def regions_of_master(chunk: Chunk) -> tuple[Region, ...]:
    """The homes in which the master lies; without one the weights' home."""
    home, master = chunk.homes[Kind.PARAM], chunk.homes.get(Kind.MASTER)
    if master is None:
        return (home,)
    # A split master is nowhere whole: upper halves are in the parameter home, remainders in the MASTER home.
    return (home, master) if chunk.splits_master else (master,)


def master_in(chunk: Chunk, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
    """(numel,) elements of the master from `start` on; of the weights if there is no master.

    contents: of `regions_of_master(chunk)`. Returns fp32, or fp64 for fp64 weights, on the master's tier; it may be a
    view.
    """
    if Kind.MASTER not in chunk.homes:
        weights = weights_in(chunk, contents[0], start, numel)
        return weights if weights.dtype is torch.float64 else weights.float()
    if not chunk.splits_master:
        return contents[0][start : start + numel]
    home, remainders = contents
    joined = torch.empty(numel, dtype=torch.float32, device=remainders.device)
    for piece in pieces_within(chunk.home_slices(), start, numel):
        # The two halves may rest on different tiers.
        weight = home[piece.in_payload].to(joined.device)
        join_master_(joined.narrow(0, piece.shard_start - start, piece.numel), weight, remainders[piece.in_shard])
    return joined


def write_master(chunk: Chunk, start: int, values: Tensor) -> None:
    """Set elements from `start` on to `values` (1-D), and with a split master also its upper half, the parameter."""
    master = ready(chunk.homes[Kind.MASTER])
    if not chunk.splits_master:
        master[start : start + values.numel()].copy_(values)
        return
    home = ready(chunk.homes[Kind.PARAM])
    for piece in pieces_within(chunk.home_slices(), start, values.numel()):
        # The split works on contiguous memory of one device. `values` may be on another one than a home, and of another
        # dtype.
        part = values.narrow(0, piece.shard_start - start, piece.numel).to(torch.float32).contiguous()
        weight = torch.empty(piece.numel, dtype=chunk.dtype, device=part.device)
        remainder = torch.empty(piece.numel, dtype=torch.int16, device=part.device)
        split_master_(weight, remainder, part)
        home[piece.in_payload].copy_(weight)
        master[piece.in_shard].copy_(remainder)


def round_as_master(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in a parameter's dtype, rounded like `round_master_` in the step.

    With any other rounding the next step would see the weight as edited and replace the master by it.
    """
    if dtype not in HALF_DTYPES or value.dtype is dtype:
        return value.to(dtype)
    rounded = torch.empty(value.numel(), dtype=dtype, device=value.device)
    round_master_(rounded, value.reshape(-1).float())
    return torch.empty_like(value, dtype=dtype).copy_(rounded.view(value.shape))


def weights_of(chunk: Chunk, start: int, numel: int) -> Tensor:
    """(numel,) elements of the parameter home, from `start` on; it may be a view."""
    return weights_in(chunk, ready(chunk.homes[Kind.PARAM]), start, numel)


def weights_in(chunk: Chunk, home: Tensor, start: int, numel: int) -> Tensor:
    """The same of a parameter home with the content `home`."""
    runs = [home[piece.in_payload] for piece in pieces_within(chunk.home_slices(), start, numel)]
    # `torch.cat` refuses an empty list, which is what a range without elements gives.
    return torch.cat(runs) if len(runs) > 1 else runs[0] if runs else home[:0]


def set_weights(managed: ManagedParameter, flat: Tensor, with_master: bool = True) -> None:
    """Set the homes to this rank's elements of `flat` (numel,): weights are rounded, a master takes them unrounded."""
    chunk = managed.chunk
    home = ready(chunk.homes[Kind.PARAM])
    for piece in managed.home_pieces:
        values = flat[piece.from_start(managed.offset).in_payload]
        home[piece.in_shard].copy_(round_as_master(values, chunk.dtype))
    if with_master and Kind.MASTER in chunk.homes:
        # Home and master may be divided differently: at stages 1 and 2 the home is whole, and the master is this rank's
        # part.
        for piece, part in zip(managed.pieces, managed.parts_of(flat), strict=True):
            write_master(chunk, piece.shard_start, part)


def set_all_weights(chunk: Chunk, payload: Tensor) -> None:
    """Set all parameters as `set_weights` sets one, from a `payload` (layout.numel,) that is zero between them."""
    home, layout = ready(chunk.homes[Kind.PARAM]), chunk.home_layout
    # What every rank holds whole has a layout of one rank, of which the only number is 0.
    for piece in layout.slices(chunk.rank if layout.world_size > 1 else 0):
        home[piece.in_shard].copy_(round_as_master(payload[piece.in_payload], chunk.dtype))
    if Kind.MASTER in chunk.homes:
        layout = chunk.optim_layout
        for piece in layout.slices(chunk.rank if layout.world_size > 1 else 0):
            write_master(chunk, piece.shard_start, payload[piece.in_payload])


def follow_edits(chunk: Chunk, start: int, weights: Tensor, before: Tensor | None) -> None:
    """The parameter has `weights` (numel,) from `start` on: the master takes over the elements that were edited.

    before: the weights before the edit, for a split master; None means that all elements count as edited.
    """
    master = ready(chunk.homes[Kind.MASTER])[start : start + weights.numel()]
    if not chunk.splits_master:
        # A whole master tells edits by itself: an unedited weight is its rounded value.
        absorb_edits_(master, weights.to(master.device))
    elif before is None:
        # With zero remainders the master equals the 16-bit weights.
        master.zero_()
    else:
        # Compare bits: NaN and -0.0 would be wrong as floats.
        edited = weights.view(torch.int16) != before.to(weights.device).view(torch.int16)
        master.masked_fill_(edited.to(master.device), 0)


def master_from_weights(chunk: Chunk, only: ManagedParameter | None = None) -> None:
    """Set the master of a chunk, or of one of its parameters, to the 16-bit weights. Local."""
    runs = [(0, chunk.optim_numel)]
    if only is not None:
        runs = [(piece.shard_start, piece.numel) for piece in only.pieces]
    for start, numel in runs:
        # The upper half of a split master is the home itself, so only the remainders are written.
        if chunk.splits_master:
            ready(chunk.homes[Kind.MASTER])[start : start + numel].zero_()
        else:
            write_master(chunk, start, weights_of(chunk, start, numel))
