"""The books of payloads: which chunk is in a slot, who leaves for whom, what is gathered ahead, and what stays.

A run and its prediction have the same object, `PayloadRules`, which names chunks by their indices and knows no tensor,
no device and no other rank. It decides, and calls what carries the decision out: `runtime/params.py` moves payloads,
`simulate.py` counts their bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from gemini.placement.demand import Demand, Kind, Placement, Tier
from gemini.placement.next_use import TOUCHES_AHEAD, Events, NextUse
from sharding import ShardLayout


class PayloadFacts(Protocol):
    """What the rules know of a chunk for good."""

    @property
    def oversize(self) -> bool:
        """It needs one of the larger slots."""

    @property
    def home_layout(self) -> ShardLayout:
        """Of the parameter home."""

    @property
    def secondary_layout(self) -> ShardLayout | None:
        """Of a second copy of the payload in the node. None: there is none."""

    @property
    def may_lend_home(self) -> bool:
        """The parameter home may hold the reduced gradient between backward and step."""

    @property
    def is_fine(self) -> bool:
        """It holds many small parameters."""


class PayloadEffects(Protocol):
    """What carries the rules out. Where a chunk needs a slot, one of its size is free, or it has its own."""

    def depart(
        self, chunk: int, lane: int, *, ahead: bool = False, only_own: bool = False, nearby: bool = False
    ) -> None:
        """Start to bring the payload into a slot; `arrive` is next. Those that are on their way have different lanes.

        ahead: nobody waits for it yet. only_own: only the part that this rank has updated. nearby: from the second copy
        in the node, which `arrive` fills otherwise.
        """

    def arrive(self, chunk: int) -> None:
        """Finish what `depart` started."""

    def refusal(self, chunk: int) -> Exception:
        """The error for a chunk that gets no slot, because all are in use."""

    def evict(self, chunk: int, successor: int) -> None:
        """Take the payload out of its slot, in which that of `successor` comes."""


class _Slots:
    """The slots of one size: which chunks are in them, and who leaves first.

    A heap of (rank, chunk) has lazy deletion: a chunk is pushed when its rank or its pins have changed, and outdated
    entries are dropped when they reach the top. A fetch then costs the logarithm of the number of slots instead of
    their number.
    """

    def __init__(self) -> None:
        self.count = 0
        self.inside: dict[int, None] = {}  # gathered chunks
        self.coming: set[int] = set()  # chunks that are gathered ahead
        self.changed: dict[int, None] = {}  # touched, unpinned or arrived since `first` was called last
        self._heap: list[tuple[int, int]] = []  # (rank, chunk)
        self._epoch = -1  # the epoch of `NextUse` in which the heap's ranks hold

    def first(self, next_use: NextUse, pins: Sequence[int]) -> int | None:
        """The chunk that leaves first: the first in the order of `NextUse` that is not in use. None: all are in use.

        The same chunk is returned until it has left.
        """
        heap, inside, rank = self._heap, self.inside, next_use.rank
        # Another epoch may change every rank, so rebuild. Rebuild as well when outdated entries outnumber the slots:
        # otherwise the heap would grow with every touch.
        if self._epoch != next_use.epoch or len(heap) + len(self.changed) > 16 + 2 * self.count:
            heap[:] = [(rank(chunk), chunk) for chunk in inside if not pins[chunk]]
            heapify(heap)
            self._epoch = next_use.epoch
        else:
            for chunk in self.changed:
                if chunk in inside and not pins[chunk]:
                    # An older entry of the chunk stays in the heap. Its rank is outdated, by which it is recognised at
                    # the top.
                    heappush(heap, (rank(chunk), chunk))
        self.changed.clear()
        # Drop entries of chunks that have left, are in use, or were touched since they were pushed.
        while heap:
            was, chunk = heap[0]
            if chunk in inside and not pins[chunk] and was == rank(chunk):
                # The entry is not popped: a gather ahead leaves this chunk in its slot if it is used before the
                # gathered one.
                return chunk
            heappop(heap)
        return None

    def reset(self) -> None:
        """No chunk is in a slot."""
        for each in (self.inside, self.coming, self.changed, self._heap):
            each.clear()


class PayloadRules:
    """The payloads of one model. What it decides follows from touches and pins alone, alike on all ranks.

    Release is lazy: a chunk that nobody pins stays in its slot until another needs it.
    """

    def __init__(self, chunks: Sequence[PayloadFacts], events: Events, max_prefetch: int) -> None:
        """max_prefetch: the number of payloads that may be on their way at once before they are asked for."""
        self.next_use = NextUse(events)
        self.max_prefetch = max_prefetch
        self.pins = [0] * len(chunks)  # operators, functions and autograd nodes that use the payload now
        self.num_gathers = [0] * len(chunks)  # times that the payload was brought into a slot
        self.nodes: dict[int, tuple[object, list[int]]] = {}  # by graph task: the node that runs, and what it pins
        self.gathered: set[int] = set()  # chunks in slots, of a pool or of their own
        self.ahead: dict[int, int] = {}  # lanes of chunks that are gathered ahead, in the order of their start
        self.at_home: list[bool] = []  # the home is the payload: no fetch, no slot
        self.staying: Collection[int] = ()  # gathered until the next update: [Note: Staying chunks] in params.py
        self.is_resident = False  # no payload leaves between forward and update
        self.nearby: set[int] = set()  # chunks whose second copy in the node is there
        self._has_secondary = [chunk.secondary_layout is not None for chunk in chunks]
        self._is_whole = [chunk.home_layout.world_size == 1 for chunk in chunks]
        self._may_lend = [chunk.may_lend_home for chunk in chunks]
        self._is_fine = [chunk.is_fine for chunk in chunks]
        # A chunk only makes room for one of its own size.
        self._sizes = _Slots(), _Slots()
        self._slots = [self._sizes[chunk.oversize] for chunk in chunks]
        self._kept: Collection[int] = ()  # chunks with slots of their own

    def follow(self, placement: Placement, demand: Demand) -> None:
        """Another placement is in force. No chunk is in a slot."""
        trained = {index for index, chunk in enumerate(demand.chunks) if not chunk.is_frozen}
        self.next_use.note_trained(trained)
        self.nearby.clear()
        self._kept = placement.kept
        for size, count in zip(self._sizes, placement.num_slots, strict=True):
            size.count = count
        tiers = [homes[Kind.PARAM] for homes in placement.homes]
        self.at_home = [whole and tier is Tier.DEVICE for whole, tier in zip(self._is_whole, tiers, strict=True)]
        for_good, stay = set[int](), set[int]()
        for i, (at_home, may_lend, is_fine) in enumerate(zip(self.at_home, self._may_lend, self._is_fine, strict=True)):
            # The home is the payload, and is never lent to a gradient.
            if at_home and not (may_lend and i in trained):
                for_good.add(i)
            # See [Note: Staying chunks] in runtime/params.py. A home that may be lent leaves its slot at a reduction.
            elif is_fine and i in self._kept and not may_lend:
                stay.add(i)
        # All or nothing: if one chunk can leave, the operators' hooks are on for all, and chunks are gathered one by
        # one.
        self.is_resident = len(for_good) + len(stay) == len(self.at_home)
        self.staying = sorted(stay) if self.is_resident else ()

    def is_there(self, chunk: int) -> bool:
        """The chunk is in a slot."""
        return chunk in self.gathered

    def is_coming(self, chunk: int) -> bool:
        """The chunk is gathered ahead, and on its way."""
        return chunk in self.ahead

    def is_in_use(self, chunk: int) -> bool:
        """The payload is pinned, or on its way to a use."""
        return self.pins[chunk] > 0 or chunk in self.ahead

    def is_kept(self, chunk: int) -> bool:
        """The chunk has a slot of its own."""
        return chunk in self._kept

    # -- pins

    def pin(self, chunk: int) -> None:
        """Count one more use of a payload that is there: it cannot leave meanwhile. See [Note: Pins] in step.py."""
        self.pins[chunk] += 1

    def unpin(self, chunks: Iterable[int]) -> None:
        """Count one use less of each of these chunks."""
        for chunk in chunks:
            # Noted first: after an interrupt in between the chunk is still found when another needs its slot.
            self._slots[chunk].changed[chunk] = None
            self.pins[chunk] -= 1

    def pin_for_node(self, chunk: int, task: int, node: object) -> None:
        """Pin the chunk until another node of the same graph task asks for one. Call `follow_node` before.

        task: number of the graph task, of which one that starts inside another has the larger one.
        """
        # The record holds the node itself, so that no later node can have its identity.
        self.nodes.setdefault(task, (node, []))[1].append(chunk)
        self.pins[chunk] += 1

    def follow_node(self, task: int, node: object) -> None:
        """An autograd node runs: lift the pins of the one before it in its graph task, and of tasks started inside."""
        if self.nodes and (task not in self.nodes or self.nodes[task][0] != node):
            self.lift_nodes(task)

    def lift_nodes(self, task: int = 0) -> None:
        """Lift the pins of the node of this graph task, which is over, and of every task started inside it; 0: of all.

        A task that reentrant checkpointing starts inside a node is over by the time that another node runs.
        """
        for inner in [each for each in self.nodes if each >= task]:
            self.unpin(self.nodes.pop(inner)[1])

    def reset_pins(self, pinned: Iterable[int]) -> None:
        """Leave the pins of these chunks. Only after a failure: nobody knows any more which others are to be lifted."""
        self.nodes.clear()
        self.pins[:] = [0] * len(self.pins)
        for chunk in pinned:
            self.pins[chunk] += 1

    # -- fetch and prefetch

    def touch(self, chunk: int) -> None:
        """A chunk that can leave is used now; `fetch` is next, if it is in no slot."""
        self.next_use.touch(chunk)
        # The touch has changed the chunk's next use, and with it its rank.
        self._slots[chunk].changed[chunk] = None

    def fetch(self, chunk: int, effects: PayloadEffects) -> None:
        """Bring a chunk that was touched into a slot, if it is in none. Raises the refusal if all are in use."""
        if chunk in self.gathered:
            return
        if self.ahead.pop(chunk, None) is None:
            self._make_room(chunk, effects)
            self.num_gathers[chunk] += 1
            effects.depart(chunk, 0, nearby=chunk in self.nearby)
        effects.arrive(chunk)
        self._note_arrived(chunk)

    def open_own_part(self, chunk: int, effects: PayloadEffects) -> None:
        """Bring only this rank's updated part into a slot. Each rank holds the chunk whole and has updated only a part.

        It counts as a gather, because the all-gather that the caller launches next fills the rest of the slot.
        """
        self.touch(chunk)
        self._make_room(chunk, effects)
        self.num_gathers[chunk] += 1
        effects.depart(chunk, 0, only_own=True)
        effects.arrive(chunk)
        self._note_arrived(chunk)

    def gather_stale(self, effects: PayloadEffects) -> None:
        """Gather all chunks that stay until the next update, as the model's forward begins: all at once."""
        stale = [chunk for chunk in self.staying if chunk not in self.gathered]
        if not stale:
            return
        self.finish_ahead(effects)
        for lane, chunk in enumerate(stale):
            self.next_use.touch(chunk)
            self.num_gathers[chunk] += 1
            effects.depart(chunk, lane)
        for chunk in stale:
            effects.arrive(chunk)
            self._note_arrived(chunk)

    def to_gather(self, effects: PayloadEffects) -> Iterator[int]:
        """The chunks to gather ahead, in order of use, as long as a slot is free for the next one before it is used.

        The caller starts each with `gather_ahead` before it asks for the next, which changes the free slots.
        """
        coming = self.next_use.coming(self.max_prefetch * TOUCHES_AHEAD)
        # A gather whose use was left out still occupies its slot. Finish it, so that the chunk can leave.
        for chunk in [each for each in self.ahead if each not in coming]:
            self._finish(chunk, effects)
        for chunk in coming:
            if len(self.ahead) >= self.max_prefetch:
                return
            if chunk in self.gathered or self.at_home[chunk] or chunk in self.ahead:
                continue
            if not self._make_room(chunk, effects, ahead=True):
                return
            yield chunk

    def gather_ahead(self, chunk: int, effects: PayloadEffects) -> None:
        """Start the gather of a chunk that `to_gather` has named."""
        # A lane names the buffers for tags, and for what gloo sends, of an all-gather. They are in use until it has
        # finished. Lane 0 is left to fetches that an operator waits for.
        taken = self.ahead.values()
        lane = 1
        while lane in taken:
            lane += 1
        self.num_gathers[chunk] += 1
        effects.depart(chunk, lane, ahead=True, nearby=chunk in self.nearby)
        self.ahead[chunk] = lane
        if chunk not in self._kept:
            self._slots[chunk].coming.add(chunk)

    def finish_ahead(self, effects: PayloadEffects) -> None:
        """Finish all gathers that were started ahead."""
        for chunk in list(self.ahead):
            self._finish(chunk, effects)

    def release(self, chunk: int) -> None:
        """The chunk leaves its slot, if it is in one, because it is stale or another chunk needs the slot."""
        self.gathered.discard(chunk)
        self._slots[chunk].inside.pop(chunk, None)

    def outdate(self, chunk: int) -> None:
        """The weights are about to change: the second copy in the node is stale."""
        self.nearby.discard(chunk)

    def reset(self) -> None:
        """No chunk is in a slot or on its way, and no use is expected: after a failed step, equally on all ranks."""
        self.gathered.clear()
        self.ahead.clear()
        self.nearby.clear()
        for size in self._sizes:
            size.reset()
        self.next_use.reset_trace()

    def _finish(self, chunk: int, effects: PayloadEffects) -> None:
        del self.ahead[chunk]
        effects.arrive(chunk)
        self._note_arrived(chunk)

    def _note_arrived(self, chunk: int) -> None:
        self.gathered.add(chunk)
        if self._has_secondary[chunk]:
            self.nearby.add(chunk)
        # A kept slot is no room for another chunk.
        if chunk not in self._kept:
            slots = self._slots[chunk]
            slots.coming.discard(chunk)
            slots.inside[chunk] = slots.changed[chunk] = None

    def _make_room(self, chunk: int, effects: PayloadEffects, ahead: bool = False) -> bool:
        """Make a slot free, or raise the refusal. ahead: return False rather than evict what is used earlier."""
        slots = self._slots[chunk]
        if len(slots.inside) + len(slots.coming) < slots.count or chunk in self._kept:
            return True
        victim = slots.first(self.next_use, self.pins)
        # Chunks whose gather is on its way cannot leave: let them arrive, and look again.
        if victim is None and not ahead:
            self.finish_ahead(effects)
            victim = slots.first(self.next_use, self.pins)
            if victim is None:
                raise effects.refusal(chunk)
        if victim is None or (ahead and not self.next_use.is_later(victim, chunk)):
            return False
        self.release(victim)
        effects.evict(victim, chunk)
        return True
