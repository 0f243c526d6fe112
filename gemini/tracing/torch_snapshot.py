"""A trace as a snapshot of torch's allocator, which pytorch.org/memory_viz opens.

The format is that of `torch.cuda.memory._dump_snapshot`: what was allocated and freed, in order, and what is there in
the end. Its devices 0, 1, ... are the tiers. A ledger knows no addresses, so each allocation gets one of its own here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from gemini.tracing.recording import RankTrace
from gemini.tracing.timeline import TierTimeline, positions_of, tiers_of

Json = dict[str, Any]


class _Block(NamedTuple):
    address: int
    num_bytes: int


def snapshot_of(trace: RankTrace) -> Json:
    """The snapshot. Pickled, it is the file."""
    tiers = tiers_of(trace)
    allocators = [_Allocator(tier) for tier in tiers]
    where = [(each.begin_s, each.name) for each in positions_of(trace)]
    traces = [list(allocator.events(where, trace.epoch_s)) for allocator in allocators]
    segments = [allocator.segment(number) for number, allocator in enumerate(allocators)]
    return {
        "segments": [each for each in segments if each["blocks"]],
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


class _Allocator:
    """Gives each allocation of a tier an address that no other one has had."""

    def __init__(self, tier: TierTimeline) -> None:
        self._tier = tier
        self._end = 0
        self._live: dict[str, list[_Block]] = {}
        for kind, num_bytes in tier.before.items():
            self._allocate(kind, num_bytes)

    def _allocate(self, kind: str, num_bytes: int) -> _Block:
        block = _Block(self._end, num_bytes)
        self._end += num_bytes
        self._live.setdefault(kind, []).append(block)
        return block

    def _free(self, kind: str, num_bytes: int) -> Iterator[tuple[str, _Block]]:
        """Free that many bytes of a kind: the block of this size, or some of which the last is divided."""
        blocks = self._live.get(kind, [])
        same = next((each for each in reversed(blocks) if each.num_bytes == num_bytes), None)
        if same is not None:
            blocks.remove(same)
            yield "free", same
            return
        # What was there when the trace began is one block of each kind, and a part of a slot may change its kind.
        while num_bytes:
            block = blocks.pop()
            yield "free", block
            if block.num_bytes > num_bytes:
                yield "alloc", self._allocate(kind, block.num_bytes - num_bytes)
            num_bytes -= min(num_bytes, block.num_bytes)

    def events(self, where: list[tuple[float, str]], epoch_s: float) -> Iterator[Json]:
        """What torch's allocator would have recorded. where: the positions in steps, and when each began."""
        tier, place = self._tier, 0
        for at_s, kind, num_bytes in tier.changes:
            while place + 1 < len(where) and where[place + 1][0] <= at_s:
                place += 1
            done = [("alloc", self._allocate(kind, num_bytes))] if num_bytes > 0 else self._free(kind, -num_bytes)
            frames = [_frame(kind, tier.name), *(_frame(words, "position") for _, words in where[place : place + 1])]
            for action, block in done:
                if block.num_bytes:
                    yield {
                        "action": "free_completed" if action == "free" else "alloc",
                        "addr": block.address,
                        "size": block.num_bytes,
                        "stream": 0,
                        "time_us": int(1e6 * (epoch_s + at_s)),
                        "frames": frames,
                    }

    def segment(self, device: int) -> Json:
        """What is there in the end, as one segment in which freed blocks are gaps."""
        blocks, end = [], 0
        live = sorted((block, kind) for kind, its in self._live.items() for block in its if block.num_bytes)
        for block, kind in live:
            if block.address > end:
                blocks.append(_block(end, block.address - end, "inactive", []))
            blocks.append(_block(block.address, block.num_bytes, "active_allocated", [_frame(kind, self._tier.name)]))
            end = block.address + block.num_bytes
        held = sum(block.num_bytes for block, _ in live)
        return {
            "device": device,
            "address": 0,
            "total_size": end,
            "allocated_size": held,
            "active_size": held,
            "requested_size": held,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [_frame(self._tier.name, "tier")],
            "blocks": blocks,
        }


def _block(address: int, num_bytes: int, state: str, frames: list[Json]) -> Json:
    sizes = {"size": num_bytes, "requested_size": num_bytes if frames else 0}
    return {"address": address, **sizes, "state": state, "frames": frames}


def _frame(name: str, file: str) -> Json:
    return {"name": name, "filename": file, "line": 0}
