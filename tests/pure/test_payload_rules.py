"""The rules of payloads: who leaves is who a look at all slots would find, whatever was touched and pinned before."""

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemini.placement.demand import Kind, Tier
from gemini.placement.next_use import Events, Phase
from gemini.placement.payload_rules import PayloadRules

NUM_CHUNKS = 7


class AllInUse(Exception):
    """A chunk gets no slot."""


class Cache:
    """Slots, which the rules fill and empty, and what they may do at each moment."""

    def __init__(self, num_slots: int, num_larger: int) -> None:
        self.events = Events()
        self.sizes = [index >= NUM_CHUNKS - 2 for index in range(NUM_CHUNKS)]  # True: it needs a larger slot
        plain: dict[str, Any] = {"may_lend_home": False, "is_fine": False, "secondary_layout": None}
        plain["home_layout"] = SimpleNamespace(world_size=2)
        facts = [SimpleNamespace(oversize=size, **plain) for size in self.sizes]
        homes = [{Kind.PARAM: Tier.HOST}] * NUM_CHUNKS
        placement = SimpleNamespace(kept=frozenset(), num_slots=(num_slots, num_larger), homes=homes)
        demand = SimpleNamespace(chunks=[SimpleNamespace(is_frozen=False)] * NUM_CHUNKS)
        self.rules = PayloadRules(cast(Any, facts), self.events, max_prefetch=2)
        self.rules.follow(cast(Any, placement), cast(Any, demand))
        self.counts = {False: num_slots, True: num_larger}
        self.inside: set[int] = set()
        self.coming: dict[int, int] = {}  # lanes by chunk
        self.is_ahead = False  # the rules look for what to gather ahead

    # What the rules call.

    def depart(
        self, chunk: int, lane: int, *, ahead: bool = False, only_own: bool = False, nearby: bool = False
    ) -> None:
        assert lane not in self.coming.values(), "its buffers are in use"
        assert (lane > 0) == ahead and not only_own
        size = self.sizes[chunk]
        taken = sum(self.sizes[each] == size for each in (*self.inside, *self.coming))
        assert taken < self.counts[size], "there is a free slot"
        assert chunk not in self.inside and chunk not in self.coming
        self.coming[chunk] = lane
        assert sum(lane > 0 for lane in self.coming.values()) <= 2

    def arrive(self, chunk: int) -> None:
        del self.coming[chunk]
        self.inside.add(chunk)

    def evict(self, chunk: int, successor: int) -> None:
        uses = self.rules.next_use
        mine = [each for each in self.inside if self.sizes[each] == self.sizes[successor] and not self.rules.pins[each]]
        assert chunk == min(mine, key=lambda each: (uses.rank(each), each))
        assert not self.is_ahead or uses.is_later(chunk, successor), "it would be fetched again first"
        self.inside.remove(chunk)

    def refusal(self, chunk: int) -> Exception:
        size = self.sizes[chunk]
        here = [each for each in self.inside if self.sizes[each] == size]
        assert len(here) == self.counts[size] and all(self.rules.pins[each] for each in here)
        return AllInUse()

    # What a model does.

    def use(self, chunk: int, pins: bool) -> None:
        self.events.reach(chunk, Phase.FORWARD)
        self.rules.touch(chunk)
        try:
            self.rules.fetch(chunk, self)
        except AllInUse:
            return
        assert chunk in self.inside
        if pins:
            self.rules.pin(chunk)
        self.is_ahead = True
        for each in self.rules.to_gather(self):
            self.rules.gather_ahead(each, self)
        self.is_ahead = False


EVENTS = ["use", "pin", "unpin", "leave", "begin", "end", "finish"]


@settings(suppress_health_check=[HealthCheck.too_slow])  # to draw long lists on a busy machine
@given(
    st.integers(1, 5),
    st.integers(1, 2),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, NUM_CHUNKS - 1)), min_size=40, max_size=120),
)
def test_who_leaves_is_who_a_search_finds(num_slots: int, num_larger: int, events: list[tuple[str, int]]) -> None:
    cache = Cache(num_slots, num_larger)
    rules = cache.rules
    for event, chunk in events * 2:  # the second time follows the record of the first for a while
        if event in ("use", "pin"):
            cache.use(chunk, pins=event == "pin")
        elif event == "unpin" and rules.pins[chunk]:
            rules.unpin([chunk])
        elif event == "leave" and chunk in cache.inside and not rules.pins[chunk]:
            rules.release(chunk)
            cache.inside.remove(chunk)
        elif event == "begin":
            rules.next_use.begin_pass()
        elif event == "end":
            rules.next_use.end_pass()
        elif event == "finish":
            rules.finish_ahead(cache)
        assert rules.gathered == cache.inside and rules.ahead == cache.coming
    rules.reset_pins([0, 0])
    assert rules.pins == [2, *[0] * (NUM_CHUNKS - 1)]
