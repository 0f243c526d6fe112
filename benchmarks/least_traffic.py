"""The least bytes that any choice of evictions fetches in a step, found by trying all: for models of few chunks.

A schedule and its pins say which chunk must be in a slot at which moment. States are the sets of chunks in slots; from
each state all victims are tried. Steps follow each other for ever, so the least is that of the best cycle of states at
steps' ends (Karp, 1978): no rule, with whatever foresight, fetches less in the long run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from gemini.placement.next_use import Act, Moment, PassSchedule
from gemini.placement.plan import Plan

State = frozenset[int]
Request = tuple[int, State]
"""A chunk, and the chunks that may not leave for it."""


def least_bytes(plan: Plan, schedule: PassSchedule, micro_batches: int = 1, trains: bool = True) -> Fraction:
    """Payload bytes a step, or a forward without gradients. All chunks rest elsewhere and share one pool of slots."""
    parts = (schedule.forward, schedule.backward) * micro_batches if trains else (schedule.forward,)
    requests = [request for part in parts for request in _requests(plan, part)]
    stale = frozenset(i for i, chunk in enumerate(plan.demand.chunks) if trains and not chunk.is_frozen)
    steps: dict[State, dict[State, int]] = {}  # by what is in slots before a step, and after it
    waiting = [State()]
    while waiting:
        start = waiting.pop()
        if start not in steps:
            steps[start] = _ends(plan, requests, start, stale)
            waiting += steps[start]
    return _best_cycle(steps)


def sweep_bytes(payload_bytes: int, num_chunks: int, num_slots: int) -> int:
    """The same in closed form: equal chunks, one after the other, all trained, each used once in a pass.

    The forward fetches all of them. The backward finds the last ones in the slots, and does not read the first chunk,
    whose input needs no gradient.
    """
    return payload_bytes * (num_chunks + max(0, num_chunks - 1 - num_slots))


def _requests(plan: Plan, moments: tuple[Moment, ...]) -> Iterator[Request]:
    """What a forward or a backward asks for: an operator's chunks stay until it ends, a node's until the next one."""
    chunk_of = {name: chunk.index for chunk in plan.packing.chunks for name in chunk.names}
    pins: Counter[int] = Counter()
    node = -1
    of_node: list[int] = []
    for moment in moments:
        if moment.act is Act.ENTER:
            for chunk in plan.use_order[moment.which]:
                yield chunk, frozenset(+pins)
                pins[chunk] += 1
        elif moment.act is Act.LEAVE:
            pins.subtract(plan.use_order[moment.which])
        elif moment.act is Act.READ:
            if moment.node != node:
                pins.subtract(of_node)
                node, of_node = moment.node, []
            chunk = chunk_of[plan.spec.weights[moment.which].name]
            yield chunk, frozenset(+pins)
            pins[chunk] += 1
            of_node.append(chunk)


def _ends(plan: Plan, requests: list[Request], start: State, stale: State) -> dict[State, int]:
    """By what is in slots after a step that began with `start`: the least bytes that were fetched."""
    num_slots, _ = plan.placement.num_slots
    costs = {start: 0}
    for chunk, pinned in requests:
        after: dict[State, int] = {}
        for state, cost in costs.items():
            nexts = [state]
            if chunk not in state:
                cost += plan.packing.chunks[chunk].payload_bytes
                nexts = [state | {chunk}]
                if len(state) == num_slots:
                    nexts = [state - {victim} | {chunk} for victim in state - pinned]
            for each in nexts:
                after[each] = min(after.get(each, cost), cost)
        costs = after
    ends: dict[State, int] = {}
    for state, cost in costs.items():
        ends[state - stale] = min(ends.get(state - stale, cost), cost)
    return ends


def _best_cycle(edges: dict[State, dict[State, int]]) -> Fraction:
    """The least mean cost of a cycle; all states can be reached from the first."""
    count = len(edges)
    rows: list[dict[State, int]] = [{next(iter(edges)): 0}]  # by number of edges: the cheapest ways to each state
    for _ in range(count):
        reached: dict[State, int] = {}
        for state, cost in rows[-1].items():
            for end, extra in edges[state].items():
                reached[end] = min(reached.get(end, cost + extra), cost + extra)
        rows.append(reached)
    return min(
        max(Fraction(cost - row[state], count - number) for number, row in enumerate(rows[:count]) if state in row)
        for state, cost in rows[count].items()
    )
