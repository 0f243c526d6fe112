"""Payloads of values whose sums show their order, their layouts, and what collectives on them must give."""

import torch
import torch.distributed as dist
from torch import Tensor

from sharding import ALIGNMENT, Collectives, Scratch, ShardLayout, Tag, Unit

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HALVES = (torch.bfloat16, torch.float16)
TAG = Tag(0xDEADBEEF, 41, 7, 2**32 - 1)
TAIL = 100  # elements of a payload after the last unit, which nobody may touch


def collectives(world_size: int) -> Collectives:
    return Collectives(dist.group.WORLD if world_size > 1 else None)


def layout_of(factors: list[int], world_size: int) -> ShardLayout:
    units, end = [], 0
    for factor in factors:
        units.append(Unit(end, factor * world_size * ALIGNMENT))
        end += units[-1].numel
    return ShardLayout(tuple(units), world_size)


def layouts_of(world_size: int) -> list[ShardLayout]:
    """The same number of elements as one unit, and as several, one of them empty."""
    return [layout_of([6], world_size), layout_of([2, 0, 1, 3], world_size)]


def values(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Of very different magnitudes: sums in another order then have other bits."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-6, 7, (numel,), generator=generator, dtype=torch.float64)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 2.0**exponent).to(dtype)


def ordered_sum(payloads: list[Tensor]) -> Tensor:
    """Rank 0 first, in fp32 for half precision."""
    total = payloads[0].float() if payloads[0].dtype in HALVES else payloads[0].clone()
    for payload in payloads[1:]:
        total = total + payload.to(total.dtype)
    return total


def shard_of(payload: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    slices = layout.slices(rank)
    return torch.cat([payload[p.payload_start : p.payload_start + p.numel] for p in slices])


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def collectives_of_a_device(world_size: int) -> Collectives:
    """Those that NCCL runs, with tags beside the exchanges and not before them, on gloo, which has them all too."""
    ours = collectives(world_size)
    ours.checks_tags_first, ours._gloo = False, None
    return ours


def assert_gathers(rank: int, world_size: int, ours: Collectives | None = None) -> None:
    ours = ours or collectives(world_size)
    for dtype in DTYPES:
        for layout in (*layouts_of(world_size), layout_of([300], world_size)):
            whole = values(1, layout.numel + TAIL, dtype)
            payload = torch.full_like(whole, float("nan"))
            payload[layout.numel :] = whole[layout.numel :]
            ours.all_gather(payload, shard_of(whole, layout, rank), layout, TAG)
            assert same_bits(payload, whole), (dtype, layout, "from the shard")

            payload[: layout.numel] = float("nan")
            for piece in layout.slices(rank):
                part = slice(piece.payload_start, piece.payload_start + piece.numel)
                payload[part] = whole[part]
            ours.all_gather(payload, None, layout, TAG)
            assert same_bits(payload, whole), (dtype, layout, "in place")


def torch_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Scratch that is as good as any."""
    return torch.empty(numel, dtype=dtype)


def reduce_scatter(
    ours: Collectives,
    payload: Tensor,
    layout: ShardLayout,
    out: Tensor,
    tag: Tag,
    scratch: Scratch = torch_memory,
    mean: bool = True,
) -> None:
    """A reduction that is waited for at once."""
    ours.start_reduce_scatter(payload, layout, out, tag, scratch=scratch, mean=mean).finish()
