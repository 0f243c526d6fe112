"""Copies between tiers: what a region's tickets make the host and streams wait for, and what waiting costs."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from gemini.memory import transfer
from gemini.memory.host_sums import HostSums
from gemini.memory.memory import EmulatedTier
from gemini.memory.slot import Slot, SlotPool
from gemini.memory.transfer import Region, Transfer, ready, wait_on_host, wait_on_stream, wait_on_tier
from gemini.placement.demand import Tier
from tests.harness import late_copies
from tests.harness.streams import CountingLane, Stream

NUMEL = 8


def region(tier: Tier, value: float = 0.0, dtype: torch.dtype = torch.float32) -> Region:
    return Region(tier, torch.full((NUMEL,), value, dtype=dtype))


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> CountingLane:
    lane = CountingLane()
    monkeypatch.setattr(transfer, "lane_of", lambda device: lane)
    return lane


def made() -> Transfer:
    return Transfer(torch.device("cpu"))


@contextmanager
def waits() -> Iterator[list[Any]]:
    """Inside: the streams on which the events were recorded that streams wait for, in order."""
    found: list[Any] = []
    with mock.patch.object(Stream, "wait_event", lambda stream, event: found.append(event.recorded_on)):
        yield found


def test_on_a_device_without_streams_a_copy_is_done_at_once() -> None:
    host, device = region(Tier.HOST), region(Tier.DEVICE, 1.0)
    copies = made()
    assert copies.copy(host, device) is None
    assert host.flat.tolist() == [1.0] * NUMEL
    assert not host.tickets.pending and not device.tickets.pending
    assert copies.bytes_by_link == {"device->host": 4 * NUMEL}


def test_a_copy_within_a_tier_is_no_traffic() -> None:
    one, other = region(Tier.DEVICE), region(Tier.DEVICE, 1.0)
    copies = made()
    copies.copy(one, other)
    assert one.flat.tolist() == [1.0] * NUMEL and not copies.bytes_by_link


def test_dtypes_may_differ() -> None:
    host = region(Tier.HOST, dtype=torch.bfloat16)
    made().copy(host, region(Tier.DEVICE, 1.5))
    assert host.flat.tolist() == [1.5] * NUMEL


def test_the_host_waits_for_the_region_that_it_means(lane: CountingLane) -> None:
    copies, first, second, other = made(), *(region(Tier.HOST) for _ in range(3))
    copies.copy(first, region(Tier.DEVICE))
    copies.copy(second, region(Tier.DEVICE))
    wait_on_host(other)
    assert lane.num_waits == 0
    wait_on_host(first)
    wait_on_host(first)
    assert lane.num_waits == 1
    wait_on_host(second)
    assert lane.num_waits == 2


def test_the_host_waits_once_for_many_regions_of_a_stream(lane: CountingLane) -> None:
    copies, homes = made(), [region(Tier.HOST) for _ in range(5)]
    for home in homes:
        copies.copy(home, region(Tier.DEVICE))
    wait_on_tier(*homes)
    assert lane.num_waits == 1


def test_the_host_may_write_when_a_copy_from_the_region_is_done(lane: CountingLane) -> None:
    home = region(Tier.HOST)
    made().copy(region(Tier.DEVICE), home)
    ready(home).fill_(2.0)
    assert lane.num_waits == 1


def test_parts_and_casts_share_the_tickets_of_the_whole(lane: CountingLane) -> None:
    home = region(Tier.HOST)
    made().copy(home[:4], region(Tier.DEVICE)[:4])
    wait_on_host(home.view(torch.uint8)[4:8])
    assert lane.num_waits == 1


def test_a_copy_runs_beside_kernels_that_do_not_wait_for_it(lane: CountingLane) -> None:
    slot, kernels = region(Tier.DEVICE), lane.current
    made().copy(slot, region(Tier.HOST))
    assert lane.current is kernels and kernels.waited_for == []
    wait_on_stream(slot)
    assert [event.recorded_on is kernels for event in kernels.waited_for] == [False] and lane.num_waits == 0


def test_a_copy_begins_behind_the_kernels_that_were_launched_before_it(lane: CountingLane) -> None:
    """The slot may still be read by the last of them, and the gradient may still be written."""
    with waits() as recorded:
        made().copy(region(Tier.DEVICE), region(Tier.HOST))
        made().copy(region(Tier.HOST), region(Tier.DEVICE))
    assert recorded == [lane.current, lane.current]


def test_the_two_directions_run_beside_each_other(lane: CountingLane) -> None:
    slot, gradient, homes = region(Tier.DEVICE), region(Tier.DEVICE), [region(Tier.HOST) for _ in range(2)]
    copies = made()
    copies.copy(slot, homes[0])
    copies.copy(homes[1], gradient)
    copies.copy(slot, homes[0])
    wait_on_stream(slot, gradient)
    assert len({id(event.recorded_on) for event in lane.current.waited_for}) == 2


def test_kernels_of_another_stream_wait_for_the_copy_and_the_host_does_not(lane: CountingLane) -> None:
    slot, home, copies = region(Tier.DEVICE), region(Tier.HOST), made()
    copies.copy(slot, home)
    lane.current = Stream()
    wait_on_stream(slot)
    assert len(lane.current.waited_for) == 1 and lane.num_waits == 0
    wait_on_host(home)
    wait_on_stream(slot)
    assert len(lane.current.waited_for) == 1, "the host has seen that it is done"


def test_a_copy_on_another_stream_is_behind_those_of_its_regions(lane: CountingLane) -> None:
    slot, home, copies = region(Tier.DEVICE), region(Tier.HOST), made()
    copies.copy(home, slot)
    with waits() as waited_for:
        copies.copy(slot, home)
    assert None not in waited_for and len(waited_for) == 2, "the slot is still read, and the home is still written"


def test_a_copy_of_what_another_copy_brings_is_behind_it(lane: CountingLane) -> None:
    slot, copies = region(Tier.DEVICE), made()
    copies.copy(slot, region(Tier.HOST))
    with waits() as waited_for:
        copies.copy(region(Tier.HOST), slot)
    assert waited_for[0] is lane.current and waited_for[1] not in (None, lane.current)


def test_one_wait_of_the_host_answers_for_the_other_direction_too(lane: CountingLane) -> None:
    """Kernels waited for the payload, and the gradient left behind the kernels: the payload has come."""
    slot, weights, gradient, home = (region(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DEVICE, Tier.HOST))
    copies = made()
    copies.copy(slot, weights)
    wait_on_stream(slot)
    copies.copy(home, gradient)
    wait_on_host(home)
    wait_on_host(weights)
    assert lane.num_waits == 1
    copies.copy(slot, weights)
    copies.copy(home, gradient)
    wait_on_host(home)
    wait_on_host(weights)
    assert lane.num_waits == 3, "no kernel has waited for the payload, so it may still be on its way"


def test_a_stream_waits_for_a_copy_once(lane: CountingLane) -> None:
    slot = region(Tier.DEVICE)
    made().copy(slot, region(Tier.HOST))
    wait_on_stream(slot)
    wait_on_stream(slot)
    assert len(lane.current.waited_for) == 1


def test_events_are_used_again(lane: CountingLane) -> None:
    copies, homes = made(), [region(Tier.HOST) for _ in range(3)]
    slot = region(Tier.DEVICE)
    for _ in range(10):
        for home in homes:
            copies.copy(slot, home)
        for home in homes:
            copies.copy(home, slot)
            wait_on_host(home)
    assert lane.num_events <= 2 * (len(homes) + 1)


def test_regions_that_are_read_for_ever_keep_one_ticket(lane: CountingLane) -> None:
    copies, home = made(), region(Tier.HOST)
    for _ in range(10):
        copies.copy(region(Tier.DEVICE), home)
    assert len(home.tickets.pending) == 1


# -- the device of tests/harness/late_copies.py finds who does not wait


def test_a_late_copy_is_made_when_the_host_waits_for_it() -> None:
    with late_copies.installed():
        host, device = region(Tier.HOST), region(Tier.DEVICE, 1.0)
        made().copy(host, device)
        assert host.flat.isnan().all()
        assert ready(host).tolist() == [1.0] * NUMEL


def test_waiting_for_one_late_copy_makes_no_other() -> None:
    with late_copies.installed():
        one, other, copies = region(Tier.HOST), region(Tier.HOST), made()
        device = region(Tier.DEVICE, 1.0)
        copies.copy(one, device)
        copies.copy(other, device)
        wait_on_host(one)
        assert other.flat.isnan().all()
        wait_on_host(other)


def test_what_a_stream_waits_for_is_there_for_kernels_only() -> None:
    with late_copies.installed():
        slot, home, copies = region(Tier.DEVICE, 1.0), region(Tier.HOST, 2.0), made()
        copies.copy(slot, home)
        assert slot.flat.isnan().all()
        wait_on_stream(slot)
        assert slot.flat.tolist() == [2.0] * NUMEL
        home.flat.fill_(3.0)
        with pytest.raises(AssertionError, match="written to before a copy from them was done"):
            wait_on_host(home)
        home.flat.fill_(2.0)


def test_memory_that_is_written_too_early_is_found() -> None:
    with late_copies.installed():
        host, device, copies = region(Tier.HOST), region(Tier.DEVICE, 1.0), made()
        copies.copy(host, device)
        device.flat.fill_(2.0)
        with pytest.raises(AssertionError, match="written to before a copy from them was done"):
            wait_on_stream(device)
        device.flat.fill_(1.0)
        host.flat.fill_(2.0)
        with pytest.raises(AssertionError, match="written to before a copy to them was done"):
            wait_on_host(host)


def test_a_temporary_that_dies_too_early_is_found() -> None:
    with late_copies.installed():
        slot, copies = region(Tier.DEVICE), made()
        copies.copy(slot, region(Tier.HOST, 1.0))
        with pytest.raises(AssertionError, match="died before a copy"):
            copies.copy(region(Tier.HOST), slot)


def test_a_copy_without_the_tickets_of_its_memory_is_found() -> None:
    with late_copies.installed():
        host, slot, copies = region(Tier.HOST, 1.0), region(Tier.DEVICE), made()
        copies.copy(slot, host)
        stranger = Region(Tier.DEVICE, slot.flat)
        with pytest.raises(AssertionError, match="is not behind one that uses the same memory"):
            copies.copy(region(Tier.HOST), stranger)


# -- sums on the host


def test_an_addition_waits_for_its_copy_when_the_sum_is_read(lane: CountingLane) -> None:
    sums, total = HostSums(made(), pins=False), region(Tier.HOST, 1.0)
    sums.put(total, region(Tier.DEVICE, 2.0), replaces=False)
    assert lane.num_waits == 0
    assert ready(total).tolist() == [3.0] * NUMEL
    assert lane.num_waits == 1
    assert ready(total).tolist() == [3.0] * NUMEL, "it is added once"


def test_a_free_slot_is_taken_whose_last_copy_is_oldest(lane: CountingLane) -> None:
    pool, copies, host = SlotPool(EmulatedTier(), 4 * NUMEL, 2, "gradient slots"), made(), region(Tier.HOST)
    first, second = _take(pool), _take(pool)
    for slot in (second, first):
        assert slot.region is not None
        copies.copy(host, slot.region.view(torch.float32))  # its gradient leaves
        pool.vacate(slot)
    # What comes into the first in order would wait for the copy that has just begun.
    assert _take(pool) is second
    assert _take(pool) is first
    pool.close()


def _take(pool: SlotPool) -> Slot:
    slot = pool.first_free()
    assert slot is not None
    slot.occupy(0)
    return slot


def test_additions_are_made_in_their_order_however_many_wait() -> None:
    """0.1 + 0.2 + 0.3 has other bits than 0.3 + 0.2 + 0.1."""
    with late_copies.installed():
        sums, totals = HostSums(made(), pins=False), [region(Tier.HOST, dtype=torch.float64) for _ in range(3)]
        addends = [[region(Tier.DEVICE, value, torch.float64) for _ in totals] for value in (0.1, 0.2, 0.3)]
        for round_ in addends:
            for total, addend in zip(totals, round_, strict=True):
                sums.put(total, addend, replaces=round_ is addends[0])
        assert [ready(total).tolist() for total in totals] == [[0.1 + 0.2 + 0.3] * NUMEL] * 3


def test_a_copy_of_a_sum_has_all_that_was_added() -> None:
    for context in (nullcontext, late_copies.installed):
        with context():
            transfer_ = made()
            sums, total, slot = HostSums(transfer_, pins=False), region(Tier.HOST, 1.0), region(Tier.DEVICE)
            addend = region(Tier.DEVICE, 2.0)
            sums.put(total, addend, replaces=False)
            transfer_.copy(slot, total)
            wait_on_stream(slot)
            assert slot.flat.tolist() == [3.0] * NUMEL


def test_parts_of_a_sum_share_its_tickets() -> None:
    sums, total = HostSums(made(), pins=False), region(Tier.HOST, 1.0)
    for part in (slice(0, 4), slice(4, 8)):
        sums.put(total[part], region(Tier.DEVICE, 2.0)[part], replaces=part.start == 0)
    assert ready(total).tolist() == [2.0] * 4 + [3.0] * 4
