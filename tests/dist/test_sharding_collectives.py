"""Collectives against a plain computation of the same, bit for bit, on 1, 2, 3 and 5 ranks."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sharding import ALIGNMENT, Collectives, ShardLayout, Tag, TagMismatch, Unit
from sharding.rank_order_sum import SUM_TILE_NUMEL
from tests.harness.ranks import RankPool

WORLD_SIZES = [1, 2, 3, 5]
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


# ---- cases, run on every rank ----


def gathers_in_place_and_from_shards(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    for dtype in DTYPES:
        for layout in layouts_of(world_size):
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


def reduces_in_rank_order(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    for dtype in DTYPES:
        for layout in layouts_of(world_size):
            payloads = [values(r, layout.numel + TAIL, dtype) for r in range(world_size)]
            total = ordered_sum(payloads)
            if world_size > 2 and dtype not in HALVES:  # else this test would not see the order
                assert not same_bits(total, ordered_sum(payloads[::-1]))
            for out_dtype in {dtype, torch.float32, torch.bfloat16}:
                for mean in (True, False):
                    payload = payloads[rank].clone()
                    out = torch.full((layout.shard_numel,), float("nan"), dtype=out_dtype)
                    ours.reduce_scatter(payload, layout, out, TAG, mean=mean)
                    expected = (total / world_size if mean else total).to(out_dtype)
                    assert same_bits(out, shard_of(expected, layout, rank)), (dtype, out_dtype, mean, layout)
                    assert same_bits(payload, payloads[rank])


def reduces_into_its_own_slice(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([4], world_size)
    (piece,) = layout.slices(rank)
    own = slice(piece.payload_start, piece.payload_start + piece.numel)
    for dtype in DTYPES:
        payloads = [values(r, layout.numel, dtype) for r in range(world_size)]
        expected = payloads[rank].clone()
        expected[own] = (ordered_sum(payloads) / world_size).to(dtype)[own]
        payload = payloads[rank].clone()
        ours.reduce_scatter(payload, layout, payload[own], TAG)
        assert same_bits(payload, expected), dtype


def reduces_to_the_same_bits_in_every_layout(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    for dtype in DTYPES:
        found = []
        for factors in ([6], [1] * 6, [3, 1, 2], [0, 5, 1]):
            layout = layout_of(factors, world_size)
            payload = values(rank, layout.numel, dtype)
            out = torch.empty(layout.shard_numel, dtype=dtype)
            ours.reduce_scatter(payload, layout, out, TAG)
            ours.all_gather(payload, out, layout, TAG)
            found.append(payload)
        assert all(same_bits(payload, found[0]) for payload in found[1:]), dtype


def reduces_many_tiles(rank: int, world_size: int) -> None:
    layout = layout_of([SUM_TILE_NUMEL // ALIGNMENT + 3], world_size)
    payloads = [values(r, layout.numel, torch.bfloat16) for r in range(world_size)]
    out = torch.empty(layout.shard_numel, dtype=torch.bfloat16)
    collectives(world_size).reduce_scatter(payloads[rank], layout, out, TAG)
    expected = (ordered_sum(payloads) / world_size).bfloat16()
    assert same_bits(out, shard_of(expected, layout, rank))


def sums_half_precision_beyond_its_range(rank: int, world_size: int) -> None:
    layout = layout_of([1], world_size)
    payload = torch.full((layout.numel,), 60000.0, dtype=torch.float16)
    out = torch.empty(layout.shard_numel, dtype=torch.float16)
    collectives(world_size).reduce_scatter(payload, layout, out, TAG)
    assert torch.all(out == 60000.0)


def asks_for_the_scratch_it_documents(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    asked: list[tuple[int, torch.dtype]] = []

    def scratch(numel: int, dtype: torch.dtype) -> Tensor:
        asked.append((numel, dtype))
        return torch.full((numel,), float("nan"), dtype=dtype)

    one, several = layouts_of(world_size)
    half, single = torch.bfloat16, torch.float32
    for layout, dtype, out_dtype, expected in (
        (one, single, single, [(one.numel, single)]),
        (several, single, single, [(several.numel, single)] * 2),
        (one, half, single, [(one.numel, half)]),
        (one, half, half, [(one.numel, half), (one.shard_numel, single)]),
    ):
        asked.clear()
        payloads = [values(r, layout.numel, dtype) for r in range(world_size)]
        out = torch.empty(layout.shard_numel, dtype=out_dtype)
        ours.reduce_scatter(payloads[rank], layout, out, TAG, scratch=scratch)
        assert asked == (expected if world_size > 1 else [])
        mean = (ordered_sum(payloads) / world_size).to(out_dtype)
        assert same_bits(out, shard_of(mean, layout, rank))


def an_empty_layout_moves_nothing(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    payload, nothing = values(rank, TAIL, torch.float32), torch.empty(0)
    for layout in (layout_of([], world_size), layout_of([0, 0], world_size)):
        before = payload.clone()
        ours.all_gather(payload, nothing, layout, TAG)
        ours.all_gather(payload, None, layout, TAG)
        ours.reduce_scatter(payload, layout, nothing, TAG)
        assert same_bits(payload, before)
    assert ours.bytes_sent == 0


def a_wrong_tag_raises_everywhere(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([1, 2], world_size)
    for field in Tag._fields:
        wrong = TAG._replace(**{field: getattr(TAG, field) ^ 1})
        odd = world_size - 1
        tag = wrong if rank == odd else TAG
        for kind in ("all_gather", "reduce_scatter"):
            payload = values(rank, layout.numel, torch.bfloat16)
            shard = torch.full((layout.shard_numel,), 3.0, dtype=torch.bfloat16)
            args = (payload, shard, layout) if kind == "all_gather" else (payload, layout, shard)
            with pytest.raises(TagMismatch) as caught:
                getattr(ours, kind)(*args, tag)
            assert torch.all(shard == 3.0)
            if kind == "all_gather":
                assert same_bits(payload, values(rank, layout.numel, torch.bfloat16)), "on gloo nothing was launched"
            assert (caught.value.rank, caught.value.expected) == (rank, tag)
            assert caught.value.found == {r: wrong if r == odd else TAG for r in range(world_size)}
            for r in range(world_size):
                assert f"rank {r}: {wrong if r == odd else TAG}" in str(caught.value)
    gathers_in_place_and_from_shards(rank, world_size)  # and the group is usable


def different_collectives_meet_in_their_tags(rank: int, world_size: int) -> None:
    """Each rank launches another kind, of another size: gloo would end the process if they met."""
    ours = collectives(world_size)
    small, large = layout_of([1], world_size), layout_of([8], world_size)
    payload, bytes_of = torch.ones(large.numel), bytes(1000)
    for shift in range(6):
        kinds: list[Callable[[Tag], Any]] = [
            lambda tag: ours.all_gather(payload, None, small, tag),
            lambda tag: ours.reduce_scatter(payload, large, torch.ones(large.shard_numel), tag),
            lambda tag: ours.all_reduce_sum_(torch.ones(3), tag),
            lambda tag: ours.all_gather_bytes(bytes_of, tag),
            lambda tag: ours.broadcast_(torch.ones(77), 0, tag),
            lambda tag: ours.all_gather(payload, None, large, tag),
        ]
        kind = (rank + shift) % len(kinds)
        with pytest.raises(TagMismatch):
            kinds[kind](TAG._replace(chunk=kind))
    gathers_in_place_and_from_shards(rank, world_size)


def counts_bytes_and_launches(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    one, several = layouts_of(world_size)

    def sent(call: Callable[[], Any]) -> int:
        before = ours.bytes_sent
        call()
        return ours.bytes_sent - before

    for dtype in DTYPES:
        for layout in (one, several):
            payload = values(rank, layout.numel + TAIL, dtype)
            shard = torch.zeros(layout.shard_numel, dtype=dtype)
            others = (world_size - 1) * layout.shard_numel * dtype.itemsize
            assert sent(lambda: ours.all_gather(payload, shard, layout, TAG)) == others
            assert sent(lambda: ours.all_gather(payload, None, layout, TAG)) == others
            assert sent(lambda: ours.reduce_scatter(payload, layout, shard, TAG)) == others
    limbs = torch.ones(world_size * 10, dtype=torch.int64)
    assert sent(lambda: ours.all_reduce_sum_(limbs)) == 2 * (world_size - 1) * 80
    last = world_size - 1
    assert sent(lambda: ours.broadcast_(limbs, last)) == (limbs.nbytes if 0 < last == rank else 0)
    assert sent(lambda: ours.all_gather_bytes(b"abc")) == (world_size - 1) * (8 + 3)
    ours.barrier()
    expected = {
        "all_gather": 16,
        "reduce_scatter": 8,
        "all_reduce": 1,
        "broadcast": 1,
        "all_gather_bytes": 2,
        "barrier": 1,
    }
    assert dict(ours.calls) == (expected if world_size > 1 else {})


def small_collectives(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    assert (ours.rank, ours.world_size) == (rank, world_size)
    limbs = torch.tensor([2**62 // world_size, -(rank + 1)])
    ours.all_reduce_sum_(limbs)
    assert limbs.tolist() == [2**62 // world_size * world_size, -world_size * (world_size + 1) // 2]
    most = torch.tensor([rank + 0.5, -rank])
    ours.all_reduce_max_(most)
    assert most.tolist() == [world_size - 0.5, 0]
    for src in range(world_size):
        weight = torch.full((3,), float(rank), dtype=torch.bfloat16)
        ours.broadcast_(weight, src)
        assert weight.tolist() == [src] * 3
    with pytest.raises(ValueError, match="src"):
        ours.broadcast_(limbs, world_size)
    messages = [bytes(range(7 * r % 256)) for r in range(world_size)]
    assert ours.all_gather_bytes(messages[rank]) == messages
    assert ours.all_gather_bytes(b"") == [b""] * world_size
    ours.barrier()


def every_launch_goes_through_wait(rank: int, world_size: int) -> None:
    waited: list[dist.Work] = []

    def watched(work: dist.Work) -> None:
        waited.append(work)
        work.wait()

    ours = Collectives(dist.group.WORLD if world_size > 1 else None, watched)
    layout = layout_of([2], world_size)
    payload, shard = values(rank, layout.numel, torch.float32), torch.zeros(layout.shard_numel)
    for launch, works in (
        (lambda: ours.all_gather(payload, shard, layout, TAG), 1 + world_size),
        (lambda: ours.reduce_scatter(payload, layout, shard, TAG), 2),
        (lambda: ours.all_reduce_sum_(shard), 1),
        (lambda: ours.all_reduce_max_(shard, TAG), 2),
        (lambda: ours.broadcast_(shard), 1),
        (lambda: ours.broadcast_(shard, 0, TAG), 2),
        (lambda: ours.all_gather_bytes(b"x"), 2),
        (lambda: ours.barrier(), 1),
    ):
        waited.clear()
        launch()
        assert len(waited) == (works if world_size > 1 else 0)


def keeps_an_exchange_in_flight_beside_others(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([2, 1], world_size)
    wholes = [values(r, layout.numel, torch.float32) for r in range(world_size)]
    out, gathered, ones = torch.zeros(layout.shard_numel), torch.zeros(layout.numel), torch.ones(3)
    reduction = ours.start_reduce_scatter(wholes[rank], layout, out, TAG)
    ours.all_gather(gathered, shard_of(wholes[0], layout, rank), layout, TAG)
    ours.all_reduce_sum_(ones, TAG)
    assert world_size == 1 or not out.any(), "written by finish()"
    reduction.finish()
    assert same_bits(out, shard_of(ordered_sum(wholes) / world_size, layout, rank))
    assert same_bits(gathered, wholes[0])
    assert ones.tolist() == [world_size] * 3


def overlaps_thousands_of_times(rank: int, world_size: int) -> None:
    """gloo's coalesced all-gather corrupts the heap within 20,000 rounds of such a load."""
    ours = collectives(world_size)
    layout = layout_of([1, 1], world_size)
    payload, shard = torch.ones(layout.numel), torch.zeros(layout.shard_numel)
    for _ in range(30_000):
        reduction = ours.start_reduce_scatter(payload, layout, shard, TAG)
        ours.all_gather(torch.empty(layout.numel), torch.ones(layout.shard_numel), layout, TAG)
        reduction.finish()
        assert shard[-1] == 1


def works_in_inference_mode_and_out_of_it_without_warnings(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([1, 1], world_size)
    payload = torch.ones(layout.numel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                out = torch.empty(layout.shard_numel)
                ours.reduce_scatter(payload, layout, out, TAG)
                ours.all_gather(payload, out, layout, TAG)
        ours.all_gather_bytes(b"x")
        ours.broadcast_(payload)


def wrong_tensors_are_refused_before_anything_is_sent(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([2], world_size)
    payload, shard = torch.zeros(layout.numel), torch.zeros(layout.shard_numel)
    for bad_payload in (payload[:-1], payload.view(2, -1), torch.zeros(2 * layout.numel)[::2]):
        with pytest.raises(ValueError, match="payload must be contiguous, 1-D, of at least"):
            ours.all_gather(bad_payload, shard, layout, TAG)
    for bad_shard in (shard[:-1], shard.view(2, -1), torch.zeros(2 * layout.shard_numel)[::2]):
        with pytest.raises(ValueError, match="shard must be contiguous of shape"):
            ours.all_gather(payload, bad_shard, layout, TAG)
        with pytest.raises(ValueError, match="out must be contiguous of shape"):
            ours.reduce_scatter(payload, layout, bad_shard, TAG)
    with pytest.raises(ValueError, match=r"shard is torch\.bfloat16, payload is torch\.float32"):
        ours.all_gather(payload, shard.bfloat16(), layout, TAG)
    with pytest.raises(ValueError, match="needs float tensors"):
        ours.reduce_scatter(payload.long(), layout, shard, TAG)
    with pytest.raises(ValueError, match=f"layout is for {world_size + 1} ranks, the group has {world_size}"):
        ours.all_gather(payload, shard, layout_of([1], world_size + 1), TAG)
    assert ours.bytes_sent == 0


def knows_gloo_by_the_device(rank: int, world_size: int) -> None:
    """`init_process_group()` without a backend gives a group whose backend's name says nothing."""
    group = dist.new_group(backend="cpu:gloo") if world_size > 1 else None
    assert group is None or dist.get_backend(group) != "gloo"
    ours = Collectives(group)
    assert ours.checks_tags_first is (world_size > 1)
    layout = layout_of([1, 2], world_size)
    whole = values(1, layout.numel, torch.float32)
    payload = torch.zeros_like(whole)
    ours.all_gather(payload, shard_of(whole, layout, rank), layout, TAG)
    assert same_bits(payload, whole)
    assert [len(one) for one in ours.all_gather_bytes(b"x" * rank, TAG)] == list(range(world_size))
    if group is not None:
        with pytest.raises(ValueError, match=r"no backend for tensors on 'cuda', only cpu:gloo.*'cpu:gloo,cuda:nccl'"):
            Collectives(group, device=torch.device("cuda"))
        dist.destroy_process_group(group)


CASES = [
    gathers_in_place_and_from_shards,
    knows_gloo_by_the_device,
    reduces_in_rank_order,
    reduces_into_its_own_slice,
    reduces_to_the_same_bits_in_every_layout,
    reduces_many_tiles,
    sums_half_precision_beyond_its_range,
    asks_for_the_scratch_it_documents,
    an_empty_layout_moves_nothing,
    counts_bytes_and_launches,
    small_collectives,
    every_launch_goes_through_wait,
    keeps_an_exchange_in_flight_beside_others,
    works_in_inference_mode_and_out_of_it_without_warnings,
    wrong_tensors_are_refused_before_anything_is_sent,
]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_collectives(case: Callable[[int, int], None], world_size: int, ranks: RankPool) -> None:
    if world_size == 1:
        case(0, 1)  # here, without a process group
    else:
        ranks(world_size).run(case)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_wrong_tag_raises_on_every_rank_and_names_all(world_size: int, ranks: RankPool) -> None:
    ranks(world_size).run(a_wrong_tag_raises_everywhere)
    ranks(world_size).run(different_collectives_meet_in_their_tags)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3])
def test_overlap_leaves_the_heap_intact(world_size: int, ranks: RankPool) -> None:
    ranks(world_size).run(overlaps_thousands_of_times, timeout_s=600)
