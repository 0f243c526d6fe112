"""What a user sees of a step: the picture of memory, the trace for Perfetto, and torch's own view of a snapshot."""

import io
import json
import pickle
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from torch.cuda import _memory_viz

import gemini
from gemini import BudgetError, Move, ShardedModel, ShardedOptimizer
from gemini.observe import Copied, Held, Occupied, Reached, Stepped
from gemini.optimizer.step import StepReport
from gemini.placement.demand import format_bytes
from gemini.placement.next_use import Phase
from gemini.tracing.picture import page_of
from gemini.tracing.recording import Entry, Holdings, RankTrace
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, adam, build, sharded, train_step

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("auto", {}),
    "smallest": ("smallest", {}),
    "cpu": ("cpu", {}),
    "disk": ("disk", {}),
    "deferred": ("cpu", {"deferred_update": True}),
    "in backward": ("cpu", {"update_in_backward": True, "deferred_update": True}),
    "disk, deferred": ("disk", {"deferred_update": True}),
}


@contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """One that all ranks know."""
    folder = gathered(mkdtemp() if rank == 0 else "")[0]
    yield Path(folder)
    gathered(None)
    if rank == 0:
        shutil.rmtree(folder)


def trained(where: str, folder: Path) -> tuple[ShardedModel, ShardedOptimizer]:
    place, options = CASES[where]
    if place != "disk":
        return sharded(place, **options)
    options = {"tensor_placement_policy": "disk", "disk_path": folder, **options}
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL, **options)
    return model, ShardedOptimizer(model, adam(model.parameters()))


def held(model: ShardedModel) -> dict[str, dict[str, int]]:
    """What the ledgers say now."""
    memory = model.chunk_manager.memory
    tiers = [memory.device, memory.host, *([] if memory.disk is None else [memory.disk])]
    return {tier.name: {k: b for k, b in tier.ledger.bytes_by_kind.items() if b} for tier in tiers}


def numbers_in(picture: Path) -> Any:
    """What a picture shows."""
    found = re.search(r'<script id="numbers" type="application/json">(.*?)</script>', picture.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def held_at(numbers: Any, ms: float) -> dict[str, dict[str, int]]:
    """Bytes by tier and kind that a picture shows at a moment."""
    shown = {}
    for tier in numbers["tiers"]:
        now = Counter(dict(zip(tier["kinds"], tier["before"], strict=True)))
        for at, kind, more in tier["changes"]:
            if at <= ms:
                now[tier["kinds"][kind]] += more
        shown[tier["name"]] = {kind: num_bytes for kind, num_bytes in now.items() if num_bytes}
    return shown


def named_rows(events: list[Any], rank: int) -> dict[int, str]:
    names = [each for each in events if each["name"] == "thread_name" and each["pid"] == rank]
    return {each["tid"]: each["args"]["name"] for each in names}


@on_ranks(1, 2)
@pytest.mark.parametrize("where", CASES)
def test_picture_and_trace_have_the_bytes_of_the_ledgers_and_the_times_of_the_steps(
    rank: int, world_size: int, where: str
) -> None:
    with shared_folder(rank) as folder:
        model, optimizer = trained(where, folder)
        train_step(model, optimizer, 0)
        memory, collectives = model.chunk_manager.memory, model.chunk_manager.communicator.collectives
        memory.work.join()
        links, sent = Counter(memory.transfer.bytes_by_link), collectives.bytes_sent
        reports, at_steps = [], []
        model.observer.steps.listen(lambda event: at_steps.append(held(model)) if hasattr(event, "report") else None)
        with gemini.trace(model, folder / "run") as traced:
            for step in range(1, 5):
                train_step(model, optimizer, step)
                reports.append(optimizer.last_step)
            memory.work.join()
            links = Counter(memory.transfer.bytes_by_link) - links
            sent = collectives.bytes_sent - sent
            at_the_end = held(model)
        assert traced.picture == folder / "run" / f"memory_rank{rank}.html"
        numbers = numbers_in(traced.picture)
        assert numbers["world_size"] == world_size and len(numbers["chunks"]) == len(model.chunk_manager.chunks)

        # Bytes in the picture: at the end of each step, and of the block.
        assert held_at(numbers, numbers["end"]) == at_the_end
        assert [held_at(numbers, ms) for ms in numbers["step_ends"]] == at_steps
        budgets = {tier["name"]: tier["budgets"][-1][1] for tier in numbers["tiers"]}
        assert budgets["device"] == memory.device.capacity_bytes
        assert Counter(numbers["bytes_by_link"]) == links
        for link, num_bytes in links.items():
            (row,) = (row for row in numbers["rows"] if row["name"] == link)
            assert sum(bar[2] for bar in row["bars"]) == num_bytes
        assert sum(bar[2] for row in numbers["rows"] if row["name"] == "other ranks" for bar in row["bars"]) == sent

        # What is in slots in the end.
        slots = [slot for pools in (memory.slots, memory.gradient_slots) for pool in pools for slot in pool.slots]
        slots += [chunk.own_slot for chunk in model.chunk_manager.chunks if chunk.own_slot is not None]
        inside = Counter(slot.chunk for slot in slots if slot.chunk is not None)
        uses = [use for slot in numbers["slots"] for use in slot["uses"]]
        assert Counter(chunk for chunk, _, end in uses if end == numbers["end"]) == inside
        assert all(begin <= end for _, begin, end in uses)

        # The first step had begun before the trace.
        assert [each.number for each in traced.steps] == [report.number for report in reports]
        for step, report in list(zip(traced.steps, reports, strict=True))[1:]:
            assert Counter(step.moved_bytes) == +Counter(report.moved_bytes)
            assert step.update_ms == report.update_ms
            assert step.exposed_ms["update thread"] == report.exposed_ms
        if "deferred" in CASES[where][1] and world_size == 1:
            assert all(step.update_ms > 0 for step in traced.steps[1:])

        # The trace has all ranks, and the same sums.
        gathered(None)
        document = json.loads((folder / "run" / "trace.json").read_text())
        sums = document["otherData"]["ranks"]
        assert [each["rank"] for each in sums] == list(range(world_size))
        own = sums[rank]
        assert Counter(own["bytes_by_link"]) == links
        assert own["bytes_to_other_ranks"] == sent
        assert own["bytes_held"] == at_the_end
        assert [each["moved_bytes"] for each in own["steps"]] == [dict(step.moved_bytes) for step in traced.steps]
        events = [each for each in document["traceEvents"] if each["pid"] == rank]
        rows = named_rows(events, rank)
        assert {f"link {link}" for link in links} <= set(rows.values())
        by_link = Counter[str]()
        for each in events:
            if each["ph"] == "X" and each["cat"].startswith("link ") and each["cat"] != "link to other ranks":
                by_link[each["cat"].removeprefix("link ")] += each["args"]["bytes"]
        assert by_link == links
        for tier, bytes_by_kind in at_the_end.items():
            counters = [each for each in events if each["ph"] == "C" and each["name"] == f"{tier}: bytes"]
            assert +Counter(counters[-1]["args"]) == Counter(bytes_by_kind)
        assert_slices_nest(events)

        # torch's view has them too.
        assert traced.snapshot is not None
        snapshot = pickle.loads(traced.snapshot.read_bytes())
        assert_snapshot_ends_with(snapshot, list(at_the_end.values()))
        assert "<script" in _memory_viz.trace_plot(snapshot)
        assert not any((model.observer.moves, memory.transfer.heard, memory.device.ledger.heard, memory.work.heard))
        model.close()


def assert_slices_nest(events: list[Any]) -> None:
    """In a row of Perfetto's a slice lies behind another or inside it."""
    for row in {each["tid"] for each in events if each["ph"] == "X"}:
        open_ends: list[float] = []
        for each in (each for each in events if each["ph"] == "X" and each["tid"] == row):
            end = each["ts"] + each["dur"]
            while open_ends and open_ends[-1] <= each["ts"] + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, each
            open_ends.append(end)


def assert_snapshot_ends_with(snapshot: Any, tiers: list[dict[str, int]]) -> None:
    """Played back, its events make of the first blocks the last ones."""
    for device, bytes_by_kind in enumerate(tiers):
        segments = [each for each in snapshot["segments"] if each["device"] == device]
        blocks = [each for segment in segments for each in segment["blocks"] if each["state"] == "active_allocated"]
        live = {each["address"]: (each["size"], each["frames"][0]["name"]) for each in blocks}
        totals = Counter[str]()
        for size, kind in live.values():
            totals[kind] += size
        assert totals == Counter(bytes_by_kind)
        for event in reversed(snapshot["device_traces"][device]):
            if event["action"] == "alloc":
                assert live.pop(event["addr"])[0] == event["size"]
            else:
                assert event["addr"] not in live
                live[event["addr"]] = event["size"], ""


# -- Errors, and what is written beside them.


@on_ranks(1, 2)
@pytest.mark.parametrize("on_oom", [False, True])
def test_a_budget_that_is_too_small_leaves_a_picture_of_what_was_there(
    rank: int, world_size: int, on_oom: bool
) -> None:
    with shared_folder(rank) as folder:
        model, optimizer = sharded("auto")
        with pytest.raises(BudgetError) as caught:  # noqa: PT012 (the block around is what is tested)
            with gemini.trace(model, folder, on_oom=on_oom) as traced:
                for step in range(6):
                    train_step(model, optimizer, step)
                before = held(model)
                model.change_budgets(model_data_memory=100)
        assert traced.picture is not None and traced.picture.exists()
        assert str(traced.picture) in caught.value.__notes__[0]
        numbers = numbers_in(traced.picture)
        assert held_at(numbers, numbers["end"]) == held(model) == before
        # With `on_oom` only the last steps are there, whose sums are right.
        assert [each.number for each in traced.steps] == ([5, 6] if on_oom else [1, 2, 3, 4, 5, 6])
        assert optimizer.last_step is not None
        assert Counter(traced.steps[-1].moved_bytes) == +Counter(optimizer.last_step.moved_bytes)
        assert (folder / f"trace_rank{rank}.json").exists()
        model.close()


def test_a_device_without_memory_shows_where(tmp_path: Path) -> None:
    model, optimizer = sharded("auto")
    train_step(model, optimizer, 0)
    device = model.chunk_manager.memory.device

    def refuse(num_bytes: int, kind: str) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.chunk_manager.give_room()
    with mock.patch.object(device, "_allocate", refuse), pytest.raises((BudgetError, torch.OutOfMemoryError)):
        with gemini.trace(model, tmp_path, on_oom=True) as traced:
            train_step(model, optimizer, 1)
    assert traced.picture is not None
    numbers = numbers_in(traced.picture)
    (tier,) = (tier for tier in numbers["tiers"] if tier["name"] == "device")
    assert "no memory for" in tier["shortages"][0][1]
    assert "no memory for" in numbers["failures"][0][1]


def test_a_step_without_memory_that_the_script_catches_is_shown_as_it_was(tmp_path: Path) -> None:
    model, optimizer = sharded("auto")
    with gemini.trace(model, tmp_path, on_oom=True) as traced:
        for step in range(8):

            def out_of_memory(*given: object, is_due: bool = step in (3, 5)) -> None:
                if is_due:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

            hook = model.module.layers[2].register_forward_hook(out_of_memory)
            try:
                train_step(model, optimizer, step)
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
            hook.remove()
    assert traced.picture is not None
    numbers = numbers_in(traced.picture)
    assert [words for _, words in numbers["failures"]] == [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    ]
    assert numbers["words"][numbers["positions"][-1][2]] == "forward of layers.2"
    assert [each.number for each in traced.steps] == [2, 3]


def test_a_second_model_for_which_there_is_no_room_leaves_a_picture_of_the_first(tmp_path: Path) -> None:
    model, optimizer = sharded("auto")
    with pytest.raises(BudgetError) as caught:  # noqa: PT012 (the block around is what is tested)
        with gemini.trace(model, tmp_path, on_oom=True) as traced:
            train_step(model, optimizer, 0)
            gemini.ShardedModel(torch.nn.Linear(64, 64), device="emulated", model_data_memory=100)
    assert traced.picture is not None and str(traced.picture) in caught.value.__notes__[0]
    assert held_at(numbers_in(traced.picture), numbers_in(traced.picture)["end"]) == held(model)


def test_another_error_leaves_a_picture_only_of_what_was_asked_for(tmp_path: Path) -> None:
    model, optimizer = sharded("cpu")
    with pytest.raises(ZeroDivisionError), gemini.trace(model, tmp_path / "always"):
        _ = float(train_step(model, optimizer, 0)) / 0
    assert (tmp_path / "always" / "memory_rank0.html").exists()
    with pytest.raises(ZeroDivisionError), gemini.trace(model, tmp_path / "oom", on_oom=True):
        _ = 1 / 0
    with gemini.trace(model, tmp_path / "oom", on_oom=True):
        train_step(model, optimizer, 1)
    assert not (tmp_path / "oom").exists()


def test_what_is_no_sharded_model_and_a_missing_package_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"watches a ShardedModel, found Linear: .* `gemini plan`"):
        with gemini.trace(torch.nn.Linear(2, 2), tmp_path / "run"):  # type: ignore[arg-type]
            raise AssertionError
    model, _ = sharded("cpu")
    with mock.patch.dict(sys.modules, {"plotly.offline": None}), pytest.raises(ImportError, match="pip install plotly"):
        with gemini.trace(model, tmp_path / "run"):
            raise AssertionError
    assert not (tmp_path / "run").exists()
    assert not model.observer.moves


# -- The page in a browser.


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
ARGUMENTS += " --disable-component-update --disable-sync"
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def trace_of(num_chunks: int) -> RankTrace:
    """Two steps of a rank that has so many chunks, and slots for a tenth of them."""
    num_slots, size = max(2, num_chunks // 10), 4096
    capacities = {"device": (num_slots + 2) * size, "host": None}
    before = Holdings({"device": Counter(), "host": Counter({"param": num_chunks * size})}, capacities, {})
    entries: list[Entry] = []
    now, taken = 0.0, set[int]()

    def note(event: object, tier: str = "", takes_s: float = 0.0) -> None:
        nonlocal now
        now += takes_s
        entries.append(Entry(now, 1, tier, event))

    for step in range(2):
        for number in [*range(num_chunks), *reversed(range(num_chunks))]:
            slot, phase = number % num_slots, Phase.FORWARD if len(entries) % 7 else Phase.BACKWARD
            note(Reached(len(Phase) * number + phase))
            if len(taken) < num_slots:
                taken.add(slot)
                note(Held("slots", size), "device")
            note(Occupied("slots", slot, size, number), "device")
            note(Copied("host->device", size, now, now + 2e-5), takes_s=2e-5)
            note(Move("fetch", number, "host", "slot", size, 0.02, "", ((now - 2e-5, now),)), takes_s=1e-5)
        note(Stepped(StepReport(step + 1, 1.0, 1.0, None, 1.0)), takes_s=1e-4)
    reached = {before.position, *(each.event.position for each in entries if isinstance(each.event, Reached))}
    words = {position: f"an operator at {position}</script>" for position in reached}
    names = [f"layers.{number}.weight" for number in range(num_chunks)]
    return RankTrace(0, 1, 0.0, now, 0.0, 1, before, entries, 0, names, words)


@in_a_browser
@pytest.mark.parametrize("num_chunks", [10, 1000])
def test_a_picture_opens_in_a_browser_without_a_network_and_shows_a_moment(num_chunks: int, tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    page_file = tmp_path / "memory_rank0.html"
    page_file.write_text(page_of(trace_of(num_chunks), "a run"))
    said: list[str] = []
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path / "profile",
            executable_path=CHROMIUM,
            args=ARGUMENTS.split(),
            offline=True,
            viewport={"width": 1400, "height": 1000},
        )
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(page_file.as_uri())
        page.wait_for_selector("#moment h2")
        first = page.inner_text("#moment")
        screenshot = page.screenshot(full_page=True)
        box = page.locator("#picture").bounding_box()
        page.mouse.click(box["x"] + 0.8 * box["width"], box["y"] + 0.5 * box["height"])
        page.wait_for_function("before => document.getElementById('moment').innerText !== before", arg=first)
        second = page.inner_text("#moment")
        panels = page.evaluate("panels.length")
        buttons = page.locator(".modebar").bounding_box()
        context.close()
    assert not said
    num_slots = max(2, num_chunks // 10)
    full = format_bytes(num_slots * 4096)
    assert full in first and full in second, "the device's slots have their bytes"
    assert "layers." in second and "an operator at" in second
    assert panels == 6  # step, device, host, slots, links, exposed
    assert buttons["x"] > 1250, "no button lies over the legend, where a step has everything that one has"
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    colors = image.getcolors(maxcolors=image.width * image.height)
    drawn = sum(number for number, color in colors if color != (255, 255, 255))
    assert drawn > 0.2 * image.width * image.height and len(colors) > 100
