"""Tags of collectives, what is counted and waited for, and what is refused before anything is sent."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding import Collectives, Tag, TagMismatch
from sharding.tag import MOST_TOLD_BYTES
from tests.harness.on_ranks import on_ranks
from tests.harness.payloads import (
    DTYPES,
    TAG,
    TAIL,
    assert_gathers,
    collectives,
    collectives_of_a_device,
    layout_of,
    layouts_of,
    ordered_sum,
    reduce_scatter,
    same_bits,
    shard_of,
    values,
)


@on_ranks(2, 3, 5)
def test_a_wrong_tag_raises_on_every_rank_and_names_all(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    layout = layout_of([1, 2], world_size)
    for field in Tag._fields:
        wrong = TAG._replace(**{field: getattr(TAG, field) ^ 1})
        odd = world_size - 1
        tag = wrong if rank == odd else TAG
        for kind in ("all_gather", "reduce_scatter"):
            payload = values(rank, layout.numel, torch.bfloat16)
            shard = torch.full((layout.shard_numel,), 3.0, dtype=torch.bfloat16)
            gather = partial(ours.all_gather, payload, shard, layout, tag)
            reduce = partial(reduce_scatter, ours, payload, layout, shard, tag)
            with pytest.raises(TagMismatch) as caught:
                (gather if kind == "all_gather" else reduce)()
            assert torch.all(shard == 3.0)
            if kind == "all_gather":
                assert same_bits(payload, values(rank, layout.numel, torch.bfloat16)), "on gloo nothing was launched"
            assert (caught.value.rank, caught.value.expected) == (rank, tag)
            assert caught.value.found == {r: wrong if r == odd else TAG for r in range(world_size)}
            for r in range(world_size):
                assert f"rank {r}: {wrong if r == odd else TAG}" in str(caught.value)
    assert_gathers(rank, world_size)  # and the group is usable


@on_ranks(2, 3)
def test_a_tag_beside_an_exchange_is_compared_when_it_has_come(rank: int, world_size: int) -> None:
    """As on a device: the exchange itself is launched, and its result is nobody's."""
    ours = collectives_of_a_device(world_size)
    layout, large = layout_of([1, 2], world_size), layout_of([300], world_size)
    payload = values(rank, layout.numel, torch.bfloat16)
    shard = torch.full((layout.shard_numel,), 3.0, dtype=torch.bfloat16)
    exchanges: list[Callable[[Tag], object]] = [
        lambda tag: ours.all_gather(values(rank, large.numel, torch.float32), None, large, tag),
        lambda tag: reduce_scatter(ours, payload, layout, shard, tag),
        lambda tag: ours.all_reduce_sum_(torch.ones(3), tag),
        lambda tag: ours.broadcast_(torch.ones(3), 0, tag),
        lambda tag: ours.all_gather_bytes(bytes(rank), tag),
    ]
    tags = [TAG._replace(chunk=8) if r == 1 else TAG for r in range(world_size)]
    for exchange in exchanges:
        with pytest.raises(TagMismatch) as caught:
            exchange(tags[rank])
        assert caught.value.found == dict(enumerate(tags))
        exchange(TAG)
    summed = ordered_sum([values(r, layout.numel, torch.bfloat16) for r in range(world_size)])
    assert same_bits(shard, shard_of((summed / world_size).bfloat16(), layout, rank)), "of the exchange with equal tags"
    assert_gathers(rank, world_size, ours)


@on_ranks(2, 3, 5)
def test_different_collectives_meet_in_their_tags(rank: int, world_size: int) -> None:
    """Each rank launches another kind, of another size: gloo would end the process if they met."""
    ours = collectives(world_size)
    small, large = layout_of([1], world_size), layout_of([8], world_size)
    payload, bytes_of = torch.ones(large.numel), bytes(1000)
    for shift in range(6):
        kinds: list[Callable[[Tag], Any]] = [
            lambda tag: ours.all_gather(payload, None, small, tag),
            lambda tag: reduce_scatter(ours, payload, large, torch.ones(large.shard_numel), tag),
            lambda tag: ours.all_reduce_sum_(torch.ones(3), tag),
            lambda tag: ours.all_gather_bytes(bytes_of, tag),
            lambda tag: ours.broadcast_(torch.ones(77), 0, tag),
            lambda tag: ours.all_gather(payload, None, large, tag),
        ]
        kind = (rank + shift) % len(kinds)
        with pytest.raises(TagMismatch):
            kinds[kind](TAG._replace(chunk=kind))
    assert_gathers(rank, world_size)


@on_ranks(1, 2, 3, 5)
def test_bytes_and_launches_are_counted(rank: int, world_size: int) -> None:
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
            assert sent(lambda: reduce_scatter(ours, payload, layout, shard, TAG)) == others
    limbs = torch.ones(world_size * 100, dtype=torch.int64)
    assert sent(lambda: ours.all_reduce_sum_(limbs[:5])) == (world_size - 1) * 40, "few are told to every rank"
    assert sent(lambda: ours.all_reduce_sum_(limbs)) == 2 * (world_size - 1) * 800
    last = world_size - 1
    assert sent(lambda: ours.broadcast_(limbs, last)) == (limbs.nbytes if 0 < last == rank else 0)
    assert sent(lambda: ours.all_gather_bytes(b"abc")) == (world_size - 1) * 3
    assert sent(lambda: ours.all_gather_bytes(bytes(2000))) == (world_size - 1) * (MOST_TOLD_BYTES + 2000)
    ours.barrier()
    expected = {
        "all_gather": 16,
        "reduce_scatter": 8,
        "all_reduce": 2,
        "broadcast": 1,
        "all_gather_bytes": 3,
        "barrier": 1,
    }
    assert dict(ours.calls) == (expected if world_size > 1 else {})


@on_ranks(1, 2, 3, 5)
def test_small_collectives(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    assert (ours.rank, ours.world_size) == (rank, world_size)
    limbs = torch.tensor([2**62 // world_size, -(rank + 1)])
    ours.all_reduce_sum_(limbs)
    assert limbs.tolist() == [2**62 // world_size * world_size, -world_size * (world_size + 1) // 2]
    most = torch.tensor([rank + 0.5, -rank])
    ours.all_reduce_max_(most)
    assert most.tolist() == [world_size - 0.5, 0]
    ours.all_reduce_max_(torch.empty(0), TAG)
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


@on_ranks(1, 2, 3, 5)
def test_every_launch_goes_through_wait(rank: int, world_size: int) -> None:
    waited: list[dist.Work] = []

    def watched(work: dist.Work) -> None:
        waited.append(work)
        work.wait()

    ours = Collectives(dist.group.WORLD if world_size > 1 else None, watched)
    layout, large = layout_of([2], world_size), layout_of([300], world_size)
    payload, shard = values(rank, layout.numel, torch.float32), torch.zeros(layout.shard_numel)
    for launch, works in (
        (lambda: ours.all_gather(payload, shard, layout, TAG), 2),
        (lambda: ours.all_gather(torch.zeros(large.numel), None, large, TAG), 1 + world_size),
        (lambda: reduce_scatter(ours, payload, layout, shard, TAG), 2),
        (lambda: ours.all_reduce_sum_(shard[:9]), 1),
        (lambda: ours.all_reduce_max_(shard[:9], TAG), 1),
        (lambda: ours.all_reduce_sum_(shard), 1),
        (lambda: ours.all_reduce_max_(shard, TAG), 2),
        (lambda: ours.broadcast_(shard), 1),
        (lambda: ours.broadcast_(shard, 0, TAG), 2),
        (lambda: ours.all_gather_bytes(b"x"), 1),
        (lambda: ours.all_gather_bytes(b"x", TAG), 1),
        (lambda: ours.all_gather_bytes(bytes(2000), TAG), 2),
        (lambda: ours.barrier(), 1),
    ):
        waited.clear()
        launch()
        assert len(waited) == (works if world_size > 1 else 0)


@on_ranks(1, 2, 3, 5)
def test_wrong_tensors_are_refused_before_anything_is_sent(rank: int, world_size: int) -> None:
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
            reduce_scatter(ours, payload, layout, bad_shard, TAG)
    with pytest.raises(ValueError, match=r"shard is torch\.bfloat16, payload is torch\.float32"):
        ours.all_gather(payload, shard.bfloat16(), layout, TAG)
    with pytest.raises(ValueError, match="needs float tensors"):
        reduce_scatter(ours, payload.long(), layout, shard, TAG)
    with pytest.raises(ValueError, match=f"layout is for {world_size + 1} ranks, the group has {world_size}"):
        ours.all_gather(payload, shard, layout_of([1], world_size + 1), TAG)
    assert ours.bytes_sent == 0
