"""Host memory that is cut from mappings of known size: nothing overlaps, nothing is kept, what comes back is used."""

import random
import sys
import threading
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from benchmarks.measured_bytes import resident_bytes
from gemini import BudgetError, ZeroInitContext
from gemini.memory.arena import Arena, HostTier, Pinning
from gemini.placement.demand import Kind
from tests.test_interrupted_lines import Trace
from tests.zoo import mlp
from tests.zoo.registrar import Runtime

MIB = 2**20


def arena(is_registered: bool = False, keeps_pages: bool = False) -> Arena:
    return Arena(Pinning(Runtime()) if is_registered else None, keeps_pages=keeps_pages)


@pytest.mark.parametrize("keeps_pages", [False, True])
@pytest.mark.parametrize("is_registered", [False, True])
def test_buffers_start_as_zeros_never_overlap_and_leave_one_free_piece(is_registered: bool, keeps_pages: bool) -> None:
    found, draw = arena(is_registered, keeps_pages), random.Random(0)
    found.reserve(MIB)
    held: list[tuple[Tensor, int]] = []
    for number in range(600):
        if held and draw.random() < 0.5:
            buffer, value = held.pop(draw.randrange(len(held)))
            assert bool((buffer == value).all()), "another buffer was written here"
            del buffer
        else:
            buffer = found.allocate(draw.choice([1, 63, 64, 1000, 4096, 40_000, 200_000]))
            assert not torch.count_nonzero(buffer)
            assert buffer.data_ptr() % 64 == 0
            held.append((buffer.fill_(number % 255 + 1), number % 255 + 1))
            del buffer
    held.clear()
    found.trim()
    assert found.mapped_bytes == 0, "what was free was in pieces, or lost"


def test_memory_is_not_used_again_while_a_view_of_it_lives() -> None:
    tier = HostTier()
    tier.reserve(8192, Kind.PARAM)
    buffer = tier.allocate(8192, Kind.PARAM).fill_(7)
    view = buffer[100:200].view(torch.float32)
    tier.free(buffer, Kind.PARAM)
    del buffer
    other = tier.allocate(8192, Kind.PARAM).fill_(9)
    assert bool((view.view(torch.uint8) == 7).all())
    del view
    mapped_bytes = tier.mapped_bytes
    again = tier.allocate(8192, Kind.PARAM)
    assert tier.mapped_bytes == mapped_bytes
    assert not torch.count_nonzero(again)
    assert bool((other == 9).all())


def test_buffers_that_die_in_several_threads_all_come_back() -> None:
    found = arena()
    found.reserve(64 * 1000)
    for _ in range(3):
        shares = [[found.allocate(64) for _ in range(250)] for _ in range(4)]
        threads = [threading.Thread(target=share.clear) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del shares
        assert found.mapped_bytes == 64 * 1000
        whole = found.allocate(64 * 1000)
        assert found.mapped_bytes == 64 * 1000, "the ranges did not join to one"
        del whole


def _use(found: Arena) -> None:
    buffers = [found.allocate(num_bytes).fill_(1) for num_bytes in (4096, 9000, 64)]
    del buffers[1]
    buffers.append(found.allocate(8192).fill_(2))
    assert [int(buffer.sum()) for buffer in buffers] == [4096, 64, 2 * 8192], "two of them lie in one range"


def test_ctrl_c_as_a_buffer_is_taken_or_dies_loses_no_range_and_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's own hook would keep the frames of what is raised in a finalizer, and with them the buffers.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with Trace() as trace:
        _use(arena())
    assert len(trace.lines) > 30
    for line in trace.lines:
        found = arena()
        found.reserve(MIB)
        with suppress(KeyboardInterrupt), Trace(line):
            _use(found)
        thread = threading.Thread(target=_use, args=(found,), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), f"{line}: it waits for a lock that nobody will release"
        found.trim()
        assert found.mapped_bytes == 0, line


def test_the_system_gets_free_pages_back_but_those_that_are_registered_or_for_temporaries() -> None:
    for is_registered, keeps_pages in ((False, False), (True, False), (False, True)):
        found = arena(is_registered, keeps_pages)
        found.reserve(64 * MIB)
        parts = [found.allocate(16 * MIB).fill_(1) for _ in range(4)]
        before = resident_bytes()
        del parts[1:3]
        left = before - resident_bytes()
        if is_registered or keeps_pages:
            assert abs(left) < 4 * MIB
            assert found.held_bytes == 64 * MIB
        else:
            assert left > 28 * MIB
            assert found.held_bytes == 32 * MIB
        assert found.mapped_bytes == 64 * MIB
        assert all(bool((part == 1).all()) for part in parts)


@pytest.mark.parametrize("is_registered", [False, True])
def test_room_that_was_given_up_counts_for_what_comes_next_and_the_budget_holds(is_registered: bool) -> None:
    tier = HostTier(capacity_bytes=100 * 64, runtime=Runtime() if is_registered else None)
    tier.reserve(40 * 64, "param")
    kept, given_up = tier.allocate(20 * 64, Kind.PARAM), tier.allocate(20 * 64, Kind.PARAM)
    tier.free(given_up, Kind.PARAM)
    del given_up
    assert tier.homes.held_bytes == (40 if is_registered else 20) * 64
    with pytest.raises(BudgetError, match=r"host: .* bytes of optim do not fit: .* host_memory="):
        tier.reserve(81 * 64, Kind.OPTIM)
    assert tier.mapped_bytes == 40 * 64
    tier.reserve(80 * 64, Kind.OPTIM)
    assert tier.mapped_bytes == 100 * 64
    assert bool((kept == 0).all())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_step_maps_no_memory_once_the_first_ones_are_done(dtype: torch.dtype | None) -> None:
    model, optimizer = mlp.sharded("smallest", dtype=dtype)
    host, mapped = model.chunk_manager.memory.tiers[1], []
    for step in range(5):
        mlp.loss_of(model, step, dtype).backward()
        mlp.train_step(model, optimizer, step, dtype)
        mapped.append((host.mapped_bytes, host.staging.mapped_bytes))
    assert len(set(mapped[1:])) == 1, mapped
    assert "host memory mapped" in model.memory_report()


def test_weights_that_moved_into_a_model_that_is_built_on_shards_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the sizes of a transformer's weights, of which malloc would keep what was freed."""
    monkeypatch.setattr("gemini.memory.arena._TRIM_BYTES", MIB)

    def build(num_layers: int) -> nn.Module:
        with ZeroInitContext(target_device="emulated"):
            return nn.ModuleList(nn.Linear(700 + 64 * (i % 3), 700) for i in range(num_layers))

    build(4)
    before = resident_bytes()
    module = build(32)
    held = sum(parameter.numel() for parameter in module.parameters()) * 4
    assert resident_bytes() - before < 1.15 * held + 8 * MIB
    before = resident_bytes()
    del module
    assert before - resident_bytes() > 0.85 * held
