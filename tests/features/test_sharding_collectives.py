"""Collectives against a plain computation of the same, bit for bit, on 1, 2, 3 and 5 ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sharding import ALIGNMENT, Collectives, replica_numels
from sharding.collectives import SUM_TILE_NUMEL
from sharding.gloo import MOST_REPEATED_BYTES
from tests.harness.on_ranks import on_ranks
from tests.harness.payloads import (
    DTYPES,
    HALVES,
    TAG,
    TAIL,
    assert_gathers,
    collectives,
    layout_of,
    layouts_of,
    ordered_sum,
    reduce_scatter,
    same_bits,
    shard_of,
    torch_memory,
    values,
)


@on_ranks(1, 2, 3, 5)
def test_gathers_arrive_in_place_and_from_shards(rank: int, world_size: int) -> None:
    assert_gathers(rank, world_size)


@on_ranks(1, 2, 3, 5)
def test_a_reduction_adds_in_rank_order(rank: int, world_size: int) -> None:
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
                    reduce_scatter(ours, payload, layout, out, TAG, mean=mean)
                    expected = (total / world_size if mean else total).to(out_dtype)
                    assert same_bits(out, shard_of(expected, layout, rank)), (dtype, out_dtype, mean, layout)
                    assert same_bits(payload, payloads[rank])


@on_ranks(1, 2, 3, 5)
def test_a_reduction_may_write_to_the_ranks_own_slice(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([4], world_size)
    (piece,) = layout.slices(rank)
    own = slice(piece.payload_start, piece.payload_start + piece.numel)
    for dtype in DTYPES:
        payloads = [values(r, layout.numel, dtype) for r in range(world_size)]
        expected = payloads[rank].clone()
        expected[own] = (ordered_sum(payloads) / world_size).to(dtype)[own]
        payload = payloads[rank].clone()
        reduce_scatter(ours, payload, layout, payload[own], TAG)
        assert same_bits(payload, expected), dtype


@on_ranks(1, 2, 3, 5)
def test_a_reduction_has_the_same_bits_in_every_layout(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    for dtype in DTYPES:
        found = []
        for factors in ([6], [1] * 6, [3, 1, 2], [0, 5, 1]):
            layout = layout_of(factors, world_size)
            payload = values(rank, layout.numel, dtype)
            out = torch.empty(layout.shard_numel, dtype=dtype)
            reduce_scatter(ours, payload, layout, out, TAG)
            ours.all_gather(payload, out, layout, TAG)
            found.append(payload)
        assert all(same_bits(payload, found[0]) for payload in found[1:]), dtype


@on_ranks(1, 2, 3, soak=(5,))
def test_a_reduction_of_many_tiles(rank: int, world_size: int) -> None:
    layout = layout_of([SUM_TILE_NUMEL // ALIGNMENT + 3], world_size)
    payloads = [values(r, layout.numel, torch.bfloat16) for r in range(world_size)]
    out = torch.empty(layout.shard_numel, dtype=torch.bfloat16)
    reduce_scatter(collectives(world_size), payloads[rank], layout, out, TAG)
    expected = (ordered_sum(payloads) / world_size).bfloat16()
    assert same_bits(out, shard_of(expected, layout, rank))


@on_ranks(1, 2, 3, 5)
def test_sums_of_half_precision_may_exceed_its_range(rank: int, world_size: int) -> None:
    layout = layout_of([1], world_size)
    payload = torch.full((layout.numel,), 60000.0, dtype=torch.float16)
    out = torch.empty(layout.shard_numel, dtype=torch.float16)
    reduce_scatter(collectives(world_size), payload, layout, out, TAG)
    assert torch.all(out == 60000.0)


@on_ranks(1, 2, 3, 5)
def test_a_reduction_asks_for_the_scratch_that_it_documents(rank: int, world_size: int) -> None:
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
        reduce_scatter(ours, payloads[rank], layout, out, TAG, scratch=scratch)
        assert asked == (expected if world_size > 1 else [])
        mean = (ordered_sum(payloads) / world_size).to(out_dtype)
        assert same_bits(out, shard_of(mean, layout, rank))


@on_ranks(2, 3, soak=(5,))
def test_replicas_add_in_their_order_in_the_scratch_that_is_documented(rank: int, world_size: int) -> None:
    """Parts of a shard are of different sizes on three ranks, and of some there is nothing left."""
    asked: list[int] = []

    def scratch(numel: int, dtype: torch.dtype) -> Tensor:
        asked.append(numel if dtype is single else 0)
        return torch.full((numel,), float("nan"), dtype=dtype)

    single, ours = torch.float32, collectives(world_size)
    for numel in (1, ALIGNMENT, 7 * ALIGNMENT):
        sums = [values(r, numel, single) for r in range(world_size)]
        for out_dtype in (single, torch.bfloat16):
            asked.clear()
            own, out = sums[rank].clone(), torch.full((numel,), float("nan"), dtype=out_dtype)
            out = own if out_dtype is single else out
            ours.start_ordered_sum(own, out, 2 * world_size, scratch).finish()
            assert same_bits(out, (ordered_sum(sums) / (2 * world_size)).to(out_dtype)), (numel, out_dtype)
            if numel % ALIGNMENT == 0:
                # Of a tile of the sum, which is rounded, the caller knows.
                assert asked[0] <= replica_numels(numel, world_size, rounds=False)[0]
                assert asked[1:] == [] if out_dtype is single else asked[1] <= numel


@on_ranks(1, 2, 3, 5)
def test_an_empty_layout_moves_nothing(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    payload, nothing = values(rank, TAIL, torch.float32), torch.empty(0)
    for layout in (layout_of([], world_size), layout_of([0, 0], world_size)):
        before = payload.clone()
        ours.all_gather(payload, nothing, layout, TAG)
        ours.all_gather(payload, None, layout, TAG)
        reduce_scatter(ours, payload, layout, nothing, TAG)
        assert same_bits(payload, before)
    assert ours.bytes_sent == 0


@on_ranks(1, 2, 3, 5)
@pytest.mark.parametrize("is_given", [True, False])
def test_gathers_of_many_sizes_are_in_flight_at_once(rank: int, world_size: int, is_given: bool) -> None:
    """Up to `MOST_REPEATED_BYTES` go by one launch, and more by one a rank."""
    ours = collectives(world_size)
    most = MOST_REPEATED_BYTES // (4 * world_size * ALIGNMENT)
    cases = []
    for factor in (1, most, most + 1, 1, most):
        layout = layout_of([factor], world_size)
        whole = values(7, layout.numel, torch.float32)
        own = shard_of(whole, layout, rank)
        payload = torch.full_like(whole, float("nan"))
        if not is_given:
            payload[layout.slices(rank)[0].in_payload] = own
        cases.append((payload, own, layout, whole))
    for turn in range(3):
        flights = [
            ours.start_all_gather(payload, own if is_given else None, layout, TAG, use=f"lane {lane}")
            for lane, (payload, own, layout, _) in enumerate(cases)
        ]
        for flight in reversed(flights):
            flight.finish()
        for payload, _, layout, whole in cases:
            assert same_bits(payload, whole), (turn, layout)
            if is_given:
                payload.fill_(float("nan"))


@on_ranks(1, 2, 3, 5)
def test_an_exchange_stays_in_flight_beside_others(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([2, 1], world_size)
    wholes = [values(r, layout.numel, torch.float32) for r in range(world_size)]
    out, gathered, ones = torch.zeros(layout.shard_numel), torch.zeros(layout.numel), torch.ones(3)
    reduction = ours.start_reduce_scatter(wholes[rank], layout, out, TAG, scratch=torch_memory)
    ours.all_gather(gathered, shard_of(wholes[0], layout, rank), layout, TAG)
    ours.all_reduce_sum_(ones, TAG)
    assert world_size == 1 or not out.any(), "written by finish()"
    reduction.finish()
    assert same_bits(out, shard_of(ordered_sum(wholes) / world_size, layout, rank))
    assert same_bits(gathered, wholes[0])
    assert ones.tolist() == [world_size] * 3


@pytest.mark.soak
@on_ranks(2, 3, timeout_s=600)
def test_overlap_leaves_the_heap_intact(rank: int, world_size: int) -> None:
    """gloo's coalesced all-gather corrupts the heap within 20,000 rounds of such a load."""
    ours = collectives(world_size)
    layout = layout_of([1, 1], world_size)
    payload, shard = torch.ones(layout.numel), torch.zeros(layout.shard_numel)
    for _ in range(30_000):
        reduction = ours.start_reduce_scatter(payload, layout, shard, TAG, scratch=torch_memory)
        ours.all_gather(torch.empty(layout.numel), torch.ones(layout.shard_numel), layout, TAG)
        reduction.finish()
        assert shard[-1] == 1


@on_ranks(1, 2, 3, 5)
def test_collectives_work_in_inference_mode_and_out_of_it_without_warnings(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([1, 1], world_size)
    payload = torch.ones(layout.numel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                out = torch.empty(layout.shard_numel)
                reduce_scatter(ours, payload, layout, out, TAG)
                ours.all_gather(payload, out, layout, TAG)
        ours.all_gather_bytes(b"x")
        ours.broadcast_(payload)


@on_ranks(1, 2, 3, 5)
def test_gloo_is_known_by_the_device(rank: int, world_size: int) -> None:
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
