"""Moves that a user watches: with a listener, in a profile, and on stderr."""

from collections import Counter

import pytest
from torch.profiler import ProfilerActivity, profile

from gemini import Move
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import LAYERS, sharded, train_step


def moves_of_a_step(place: str) -> list[Move]:
    model, optimizer = sharded(place)
    train_step(model, optimizer, 0)
    seen: list[Move] = []
    before = Counter(model.observer.counts)
    end = model.observer.listen(seen.append)
    train_step(model, optimizer, 1)
    end()
    assert Counter(move.what for move in seen) == model.observer.counts - before
    train_step(model, optimizer, 2)
    assert model.observer.counts.total() == before.total() + 2 * len(seen)
    assert not any(move.num_bytes <= 0 or move.ms < 0 for move in seen)
    return seen


def test_a_listener_sees_every_move_and_why() -> None:
    seen = moves_of_a_step("smallest")
    by_what = {what: [move for move in seen if move.what == what] for what in ("fetch", "evict", "reduce")}
    assert {move.chunk for move in by_what["fetch"]} == {move.chunk for move in by_what["reduce"]} == set(range(LAYERS))
    assert {(move.source, move.target) for move in by_what["fetch"]} == {("host", "slot")}
    assert {(move.source, move.target) for move in by_what["evict"]} == {("slot", "host")}
    assert {move.num_bytes for move in seen} == {(16 * 16 + 256) * 4}
    assert by_what["fetch"][0].reason == "forward of layers.0"
    assert by_what["reduce"][0].reason.startswith("backward of ")
    for evicted in by_what["evict"]:
        position = seen.index(evicted)
        assert seen[position + 1].what == "fetch"
        assert evicted.reason == f"room for chunk {seen[position + 1].chunk}"


def test_what_stays_on_the_device_does_not_move() -> None:
    assert {move.what for move in moves_of_a_step("cuda")} <= {"reduce"}


@on_ranks(1, 2)
def test_a_move_that_fails_is_not_noted(rank: int, world_size: int) -> None:
    model, _ = sharded("smallest")
    moving = model.observer.moving("fetch", 0, "host", "slot", 8, "a test")
    with pytest.raises(ZeroDivisionError), moving:
        _ = 1 / 0
    assert not model.observer.counts


@on_ranks(1, 2)
def test_freezing_migrates_states_and_says_so(rank: int, world_size: int) -> None:
    model, optimizer = sharded("smallest")
    train_step(model, optimizer, 0)
    seen: list[Move] = []
    model.observer.listen(seen.append)
    for layer in model.module.layers[:-1]:
        layer.requires_grad_(False)
    train_step(model, optimizer, 1)
    migrated = [move for move in seen if move.what == "migrate"]
    assert migrated
    assert {(move.source, move.target) for move in migrated} == {("host", "device")}
    assert {move.reason for move in migrated} == {"another placement of its param"}


@on_ranks(1, 2)
def test_a_profile_reads_like_the_design(rank: int, world_size: int) -> None:
    model, optimizer = sharded("smallest")
    train_step(model, optimizer, 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train_step(model, optimizer, 1)
    names = Counter(event.name for event in profiled.events() or () if event.name.startswith("gemini::"))
    comes = "fetch" if world_size == 1 else "prefetch"
    assert {f"gemini::{what} chunk {LAYERS - 1}" for what in (comes, "reduce")} <= set(names)
    assert any(name.startswith("gemini::evict chunk ") for name in names)


@pytest.mark.parametrize("switch", ["1", "0"])
def test_every_move_is_a_line_with_gemini_log(
    switch: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMINI_LOG", switch)
    model, optimizer = sharded("smallest")
    train_step(model, optimizer, 0)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("gemini: ")]
    assert len(lines) == (sum(model.observer.counts.values()) if switch == "1" else 0)
    if lines:
        head, tail = lines[0].rsplit(" B ", 1)
        assert head == "gemini: fetch chunk 0 host -> slot 2048"
        assert tail.endswith(" ms: forward of layers.0")


@on_ranks(1, 2)
def test_gathers_that_were_started_ahead_and_reductions_are_seen(rank: int, world_size: int) -> None:
    model, optimizer = sharded("smallest")
    seen: list[Move] = []
    model.observer.listen(seen.append)
    for step in range(3):
        train_step(model, optimizer, step)
    whats = ("fetch", "prefetch", "reduce")
    sources = {what: sorted({move.source for move in seen if move.what == what}) for what in whats}
    assert Counter(move.what for move in seen)["reduce"] == 3 * LAYERS
    assert sources == {"fetch": ["host"], "prefetch": ["host"] * (world_size > 1), "reduce": ["gradient slot"]}
