"""The collectives of one model: each is tagged with what it is for, watched while a rank waits for it, and counted.

[Note: Ranks agree] All chunks have one size, so two ranks that gather different chunks would exchange garbage without
any error. Every collective therefore carries (plan hash, sequence number, chunk, position) of every rank, and data
whose tags differ is never used. Tags are left out only where all ranks have agreed on the collective before
(`ScheduleReplay`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import takewhile, zip_longest
from time import perf_counter
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.errors import DivergenceError, GeminiError, RankLostError, UnsupportedError, UpdatedInBackwardError
from gemini.memory.modes import unhooked
from gemini.memory.tier import lacks_memory
from gemini.observe import Failed, Feed, Met, Reached
from gemini.placement.next_use import Events, Phase, StepEvent
from gemini.ranks.exit_report import words_of
from gemini.ranks.group import Connection, Links, dropped, end_dropped
from gemini.ranks.mesh import RankMesh, Rows
from gemini.ranks.parts import Everyone, PartsGroup
from gemini.ranks.watchdog import IN_BACKWARD, IN_STEP, Watchdog, advice
from sharding import InFlight, ShardLayout, Tag, TagMismatch, backends, check_backend

# -- Kinds of collectives: what each is for. A tag carries the kind as a number, and errors name it.
#
# The upper bits of a tag's chunk hold the kind, so that collectives of two kinds at one place have different tags.


KINDS = (
    *("all-gather", "reduce-scatter"),  # of a chunk
    *("gradient summary", "largest gradient", "end of backward", "points of reduction", "unsynced gradients"),
    *("agreement on complete gradients", "agreement on the pass", "names of states"),
    *("change of what is trained", "change of what is compiled"),
    *("new param group", "discard_state()", "the optimizer's settings", "dropped models", "change of optimizer states"),
    *("choice of optimizer", "loaded optimizer state"),
    *("tensors to their owners", "names of the owners' states", "tensors from their owners"),
    *("mean over replicas", "mean across groups", "gather across groups"),  # of a chunk
)
"""Kinds with a number of their own. All others share the next one: ranks compare what they say of it otherwise."""
KIND_SHIFT = 24
_OF_CHUNKS = (*KINDS[:2], *KINDS[-3:])


def in_words(what: str, chunk: int) -> str:
    """A collective of this kind, for an error: with its chunk, if it has one."""
    return f"{what} of chunk {chunk}" if what in _OF_CHUNKS else what


def tag_in_words(tag: Tag) -> str:
    """The collective that has this tag, for an error."""
    kind, chunk = divmod(tag.chunk, 1 << KIND_SHIFT)
    return in_words(KINDS[kind] if kind < len(KINDS) else "collective", chunk)


# -- The schedule that ranks have agreed on: the collectives of the last pass of a kind, for as long as all follow them.
#
# [Note: Following] On gloo, comparing tags before a collective makes every rank wait for the slowest, once more than
# the collective itself does. But all ranks made the same collectives in the last pass, compared one by one, so they
# expect the same in this one. They compare their expectations at its start, and each collective that is the expected
# one then goes without tags. A rank that is about to launch another one first meets the other ranks in the store. If
# all ranks leave the schedule at the same point they go on together, with tags. If not, the others wait in a collective
# that this rank never joins. So no data is taken for other data, and the watchdog finds two different collectives with
# one number. A rank whose pass is over before its schedule leaves it, too: its loss may have had no graph, so that it
# goes to the step while others wait for it in their backward. Its next collective, whatever it is, comes after a
# meeting.


class Collective(NamedTuple):
    """What identifies a collective within a pass."""

    kind: int
    chunk: int
    position: int


class ScheduleReplay:
    """Compares the collectives of the running pass with those of the last pass of its kind."""

    def __init__(self) -> None:
        # All collectives of the running pass so far were the expected ones, or the last pass was over before all of
        # its expected ones had come, and no collective has followed.
        self.follows = False
        self._expected: dict[str | None, list[Collective]] = {}
        self._kind: str | None = None  # of the running pass
        self._made: list[Collective] = []

    def begin(self, kind: str) -> int | None:
        """Begin a pass. Returns a digest that is equal on ranks that expect the same; None if nothing is expected."""
        self._kind, self._made = kind, []
        expected = self._expected.get(kind)
        self.follows |= bool(expected)
        return crc32(repr(expected).encode()) if expected else None

    def end(self) -> None:
        """Complete the running pass, if any: the next pass of its kind is expected to be the same, and as short."""
        kind, made = self._kind, self._made
        self.drop()
        if kind is not None:
            self._expected[kind] = made

    def drop(self) -> None:
        """Forget the running pass, so that nothing is recorded. If it is cut short, other ranks may still follow it."""
        self.follows &= not (self._kind and self._made) or len(self._made) < len(self._expected.get(self._kind, ()))
        self._kind = None

    def matches(self, collective: Collective) -> bool:
        """Record the next collective. True if all ranks have agreed on it."""
        if self._kind is not None:
            self._made.append(collective)
        if self.follows:
            expected, position = self._expected.get(self._kind, []), len(self._made) - 1
            # Once left, the schedule stays left until the pass ends: what follows would be compared at shifted places.
            self.follows = expected[position : position + 1] == [collective]
        return self.follows


# -- Positions: points in a step's schedule, as numbers for tags and as words for errors.


_WORDS = {
    Phase.FORWARD: "forward of {}",
    Phase.BACKWARD: f"{IN_BACKWARD} of {{}}",
    Phase.TOUCH: "use of a parameter of {}",
    Phase.STEP: IN_STEP,
    Phase.BUILD: "building of {}",
    Phase.RECOMPUTE: "recomputed forward of {}",
}


class Recording(Protocol):
    """Is told of every event of a step."""

    def reached(self, event: StepEvent) -> None:
        """`event` begins."""


class StepPosition:
    """The current position in the step. Operator 0 is the model itself."""

    def __init__(self, operators: Sequence[str]) -> None:
        self.operators = list(operators)
        self.now = 0  # in this process; it is in the tags of collectives
        self.events = Events()
        self._recording: Recording | None = None  # measures the events of the running step, if it is recorded
        self.heard = Feed()

    @property
    def operator(self) -> int:
        """The operator of the current position."""
        return self.now // len(Phase)

    def add(self, operator: str) -> int:
        """Add an operator to the table; returns its number."""
        self.operators.append(operator)
        return len(self.operators) - 1

    def set(self, operator: int, phase: Phase) -> None:
        """Move to `phase` of `operator`, and count that as an event."""
        # One number holds both, because a tag has one field for the moment. `describe` takes it apart.
        self.now = operator * len(Phase) + phase
        self.events.reach(operator, phase)
        if self._recording is not None:
            self._recording.reached(self.events.now)
        if self.heard:
            self.heard.tell(Reached(self.now))

    def return_to(self, position: int) -> None:
        """Be at `position` again, which `now` was before a use that has ended. That is no event."""
        self.now = position
        if self.heard:
            self.heard.tell(Reached(position))

    def reset(self) -> None:
        """Be where a step begins: the running one failed."""
        self.now = 0

    @property
    def is_recorded(self) -> bool:
        """Whether a recording of the running step has begun."""
        return self._recording is not None

    def begin_recording(self, recording: Recording) -> None:
        """Tell `recording` of every event from now on."""
        self._recording = recording

    def end_recording(self) -> None:
        """Tell the recording of no event any more. Without one nothing happens."""
        self._recording = None

    def here(self) -> str:
        """The current position in words."""
        return self.describe(self.now)

    def describe(self, position: int) -> str:
        # In an error the position may be another rank's, whose table has operators that this one lacks.
        operator, phase = divmod(position, len(Phase))
        if (operator, phase) == (0, Phase.TOUCH):  # `Step.check_idle`: no operator's parameter is at this place
            return "a call between steps for the whole model, such as state_dict()"
        name = self.operators[operator] if operator < len(self.operators) else f"operator {operator}"
        return _WORDS[Phase(phase)].format(name or "the model")


# -- Shows where two ranks' descriptions of one thing differ, for an error.


_BEFORE, _BEHIND = 120, 80  # characters around the first difference


def first_difference(one: str, other: str) -> str:
    """The first line that differs, of both texts, from some characters before its first difference on."""
    lines = zip_longest(one.split("\n"), other.split("\n"), fillvalue="nothing more")
    mine, its = next(((a, b) for a, b in lines if a != b), ("", ""))
    at = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(mine, its, strict=False))))
    start = max(0, at - _BEFORE)
    shown = ("..." * (start > 0) + line[start : at + _BEHIND] for line in (mine, its))
    return " against ".join(shown)


_BUILD_ALIKE = "All ranks must build the same model with the same arguments"


class LastCollective:
    """The collective that this rank has launched last, which the watchdog names where ranks wait for one another."""

    def __init__(self, position: StepPosition) -> None:
        self._position = position
        self.restart()

    def restart(self) -> None:
        """Count from 0: ranks have failed at different points, and their next collective is the first again."""
        self.sequence = 0
        self._what, self._chunk, self._moment = "start", 0, 0

    def begin(self, what: str, chunk: int, moment: int) -> int:
        """A collective is launched. Returns its number, from 1."""
        self.sequence += 1
        self._what, self._chunk, self._moment = what, chunk, moment
        return self.sequence

    def where(self) -> tuple[int, str]:
        """(number, description), equal on all ranks that run the same code."""
        what, place = in_words(self._what, self._chunk), self._position.describe(self._moment)
        return self.sequence, f"{what}, {place} (collective {self.sequence})"


def _finish_told(finish: Callable[[], None], met: Met) -> None:
    """Finish a collective that somebody was told of."""
    met.begin_wait()
    finish()
    met.end()


HEARS_WITHIN_S = 10.0
"""A rank looks for failures once a second wherever it waits for others of its model. One that has not heard after this
time waits elsewhere."""
_CANNOT_GO_ON = (
    "a model divided by tensor or pipeline parallelism cannot go on after this failure, start it again from a "
    "checkpoint: "
)


class Communicator:
    """The collectives of the ranks of one model, in process groups of its own. Collective to create.

    `rank` and `world_size` are those of all ranks, which agree and broadcast together. Payloads are gathered and
    reduced among the ranks that share the shards: `shard_rank` of `num_shards`. A reduction goes on with the replicas.
    """

    def __init__(self, mesh: RankMesh, position: StepPosition, rank_timeout_s: float, device: torch.device) -> None:
        group = mesh.group
        self.position = position
        self.plan_hash = 0  # of the plan in force; 0 before there is one
        self._last = LastCollective(position)
        self.heard = Feed()
        self._met: Met | None = None  # the last collective, if anybody listens
        self._process = os.getpid()
        self._replay = ScheduleReplay()
        self._parent = group
        self.rows: Rows = mesh.rows  # the global ranks that take part: a row for each replica
        self._nearby = mesh.nearby  # parts of the rows that hold a second copy of the weights
        self.device = device
        if group is not None:
            check_backend(group, device)
        self.watch: Watchdog | None = None
        is_divided = len(mesh.parts) > 1 or len(mesh.stages) > 1
        if group is not None and (group.size() > 1 or is_divided):
            self.watch = Watchdog(group, rank_timeout_s, self._last.where, backends(group)[device.type] == "gloo")
        self._connection = Connection(mesh, self.watch, rank_timeout_s, device)
        self._use(self._connection.open())
        self._end_dropped()
        self.parts = self._group_of(mesh.parts, rank_timeout_s)
        self._whole = self._group_of(mesh.stages, rank_timeout_s) if mesh.stages else self.parts
        self._exchanges, self._has_stages = mesh.exchanges, len(mesh.stages) > 1
        if self._whole is not None and self.watch is not None:
            every = self._whole.collectives.all_gather_bytes(json.dumps(self.ranks).encode())
            self.watch.widen(sorted(rank for its in every for rank in json.loads(its)))
        self._keeps_parts = True  # their groups can be ended together
        # What all ranks of a model do together, whichever part of its tensors they have.
        self.everyone: Communicator | Everyone = self if self.parts is None else Everyone(self, self.parts)

    def _group_of(self, ranks: tuple[int, ...], rank_timeout_s: float) -> PartsGroup | None:
        if len(ranks) <= 1:
            return None
        wait = None if self.watch is None else partial(self.watch.wait, is_beside=True)
        return PartsGroup(ranks, wait, rank_timeout_s, self.device)

    def _use(self, links: Links) -> None:
        self._links, self.collectives, self._shards = links, links.all, links.shards
        # A layout says by its number of ranks who gathers.
        self._among = {self._shards.world_size: self._shards}
        if links.nearby is not None:
            self._among[links.nearby.world_size] = links.nearby

    def follow_plan(self, plan_hash: int) -> None:
        """Collectives from now on are of the plan with this hash, which their tags have. 0: of none. Local."""
        self.plan_hash = plan_hash

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        return self.collectives.world_size

    @property
    def shard_rank(self) -> int:
        """This rank's place among those that share the shards."""
        return self._shards.rank

    @property
    def num_shards(self) -> int:
        """The number of ranks that share the shards."""
        return self._shards.world_size

    @property
    def replica(self) -> int:
        """Which of the replicas of its shard this rank holds."""
        return 0 if self._shards.replicas is None else self._shards.replicas.rank

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent, without tags."""
        return sum(self.bytes_by_group.values())

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """The same by the group in which they travelled: "all" ranks, those of its "shards", its "replicas".

        "nearby": those that hold a second copy of the weights. "across": where all ranks share optimizer states, those
        with the same place in other groups.
        """
        found, shards = {"all": self.collectives.bytes_sent}, self._shards
        if self._links.nearby is not None:
            found["nearby"] = self._links.nearby.bytes_sent
        if self._links.across is not None:
            found["across"] = self._links.across.bytes_sent
        if shards is not self.collectives:
            found["shards"] = shards.bytes_sent
        if shards.replicas is not None:
            found["replicas"] = shards.replicas.bytes_sent
        return found

    @property
    def users_group(self) -> dist.ProcessGroup | None:
        """The user's process group of these ranks, whose collectives are the user's. None: one rank."""
        return self._parent

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that take part, in the order of `rank`."""
        return (0,) if self._parent is None else tuple(dist.get_process_group_ranks(self._parent))

    def begin_pass(self, kind: str) -> None:
        """Begin a pass, which is expected to make the same collectives as the last pass of this kind. Collective."""
        # Only gloo compares tags ahead of a collective, which following a schedule saves: see [Note: Following].
        if not self.collectives.checks_tags_first:
            return
        self._replay.drop()
        is_cut_short, expected = self._replay.follows, self._replay.begin(kind)
        if expected is not None:
            # The tag carries a digest of what this rank expects: if ranks expect different passes, their tags differ.
            tag = self._tag("agreement on the pass", expected & 0xFFFFFF)
            if is_cut_short and self.watch is not None:
                self.watch.meet()
            with self._agreeing():
                self.collectives.check(tag)

    def end_pass(self) -> None:
        """The running pass is complete; the next one of its kind is expected to be like it. Local."""
        self._replay.end()

    def drop_pass(self) -> None:
        """End the pass without remembering it: collectives until the next pass belong to none. Local."""
        self._replay.drop()

    def all_gather(self, payload: Tensor, shard: Tensor | None, layout: ShardLayout, chunk: int) -> None:
        """Fill `payload` from all ranks' shards. This rank's own may lie in it already. Collective."""
        self.start_all_gather(payload, shard, layout, chunk)()

    def all_gather_of_all(self, payload: Tensor, shard: Tensor, layout: ShardLayout, chunk: int) -> None:
        """As `all_gather` over all ranks in the order of `rank`, however the model divides them. Collective.

        A module that is under construction is divided so.
        """
        tag = self._next("all-gather", chunk)
        with self._agreeing():
            self.collectives.all_gather(payload, shard, layout, tag)

    def start_all_gather(
        self, payload: Tensor, shard: Tensor | None, layout: ShardLayout, chunk: int, lane: int = 0
    ) -> Callable[[], None]:
        """Start to fill `payload`. Call the returned function before payload or shard is used. Collective.

        Raises DivergenceError where ranks launch different collectives, as the returned function does.
        lane: all-gathers that are in flight at the same time need one each.
        """
        tag, among = self._next("all-gather", chunk), self._among[layout.world_size]
        try:  # as `_agreeing`, whose generator would cost four calls for each of a step's many collectives
            with unhooked():
                launched = among.start_all_gather(payload, shard, layout, tag, use=f"all_gather {lane}")
        except TagMismatch as mismatch:
            raise self._refusal(mismatch) from None
        return self._finishing(launched)

    def start_reduce_scatter(
        self,
        payload: Tensor,
        layout: ShardLayout,
        out: Tensor,
        chunk: int,
        scratch: Callable[[int, torch.dtype], Tensor],
    ) -> Callable[[], None]:
        """Start to write this rank's shard of the mean over ranks, summed in rank order, to `out`. Collective.

        Call the returned function to finish. Until then `payload`, `out` and what `scratch` gave out must not be used.
        Raises as `start_all_gather`.
        """
        tag, among = self._next("reduce-scatter", chunk), self._among[layout.world_size]
        try:  # likewise
            with unhooked():
                launched = among.start_reduce_scatter(payload, layout, out, tag, mean=True, scratch=scratch)
        except TagMismatch as mismatch:
            raise self._refusal(mismatch) from None
        return self._finishing(launched)

    def _finishing(self, launched: InFlight) -> Callable[[], None]:
        # An interrupt may come before `finish`: the group must not be ended while one of these works is open.
        # `finish` launches no collective, so that the saved-tensor hooks may stay.
        is_open = self._connection.works
        is_open.update(launched.works)

        def finish() -> None:
            try:
                launched.finish()
            except TagMismatch as mismatch:
                raise self._refusal(mismatch) from None
            is_open.difference_update(launched.works)

        return finish if self._met is None else partial(_finish_told, finish, self._met)

    def all_reduce_sum_(self, tensor: Tensor, what: str) -> None:
        """Replace `tensor` by the sum over ranks. `what` names the collective. Collective."""
        tag = self._next(what, 0)
        with self._agreeing():
            self.collectives.all_reduce_sum_(tensor, tag)

    def all_reduce_max_(self, tensor: Tensor, what: str) -> None:
        """Replace `tensor` by the maximum over ranks. `what` names the collective. Collective."""
        tag = self._next(what, 0)
        with self._agreeing():
            self.collectives.all_reduce_max_(tensor, tag)

    @property
    def is_divided(self) -> bool:
        """Whether other ranks have other parts, or stages, of the model."""
        return self._whole is not None

    def sum_over_parts_(self, tensor: Tensor) -> None:
        """Replace `tensor`, equal on the ranks of this part, by the sum over parts and stages. Collective."""
        if self._whole is not None:
            self._whole.collectives.all_reduce_sum_(tensor)

    def max_over_parts_(self, tensor: Tensor) -> None:
        """Replace `tensor`, equal on the ranks of this part, by the maximum over parts and stages. Collective."""
        if self._whole is not None:
            self._whole.collectives.all_reduce_max_(tensor)

    def least(self, numbers: Sequence[int], what: str) -> list[int]:
        """The minimum of each number over ranks: the negated maximum of the negated numbers. Collective."""
        found = torch.tensor([-number for number in numbers], dtype=torch.int64, device=self.device)
        self.all_reduce_max_(found, what)
        return [-number for number in found.tolist()]

    def wait_for_all(self, what: str) -> None:
        """Wait until every rank comes here; raises if one has failed before. Collective."""
        self.all_reduce_max_(torch.zeros(1, dtype=torch.int64, device=self.device), what)

    def broadcast_(self, tensor: Tensor, what: str | None, src: int = 0) -> None:
        """Replace `tensor`, on any device, by rank `src`'s. Collective.

        what: names the collective. None right after ranks have agreed on it: then it needs no tag.
        """
        tag = None if what is None else self._next(what, 0)
        carried = tensor.to(self.device) if self.world_size > 1 else tensor
        with self._agreeing():
            self.collectives.broadcast_(carried, src, tag=tag)
        if carried is not tensor:
            tensor.copy_(carried)

    def start_mean_of_replicas(
        self, own: Tensor, out: Tensor, chunk: int, scratch: Callable[[int, torch.dtype], Tensor]
    ) -> Callable[[], None]:
        """Start to write the mean of `own` over the replicas, added in their order, to `out`. Collective.

        own: as of `Collectives.start_ordered_sum`. Call the returned function to finish. Raises as `start_all_gather`.
        """
        replicas, tag = self._shards.replicas, self._next("mean over replicas", chunk)
        assert replicas is not None
        with self._agreeing():
            if tag is not None:
                self.collectives.check(tag)
            launched = replicas.start_ordered_sum(own, out, replicas.world_size, scratch)
        return self._finishing(launched)

    def gather_across(self, payload: Tensor, layout: ShardLayout, chunk: int) -> None:
        """Fill `payload` from the ranks with this one's place in all groups, whose parts lie in it. Collective.

        Raises as `start_all_gather`.
        """
        across, tag = self._links.across, self._next("gather across groups", chunk)
        assert across is not None
        with self._agreeing():
            across.all_gather(payload, None, layout, tag)

    def start_mean_across(
        self,
        payload: Tensor,
        layout: ShardLayout,
        out: Tensor,
        chunk: int,
        scratch: Callable[[int, torch.dtype], Tensor],
    ) -> Callable[[], None]:
        """As `start_reduce_scatter`, over the ranks with this one's place in all groups. Collective."""
        across, tag = self._links.across, self._next("mean across groups", chunk)
        assert across is not None
        with self._agreeing():
            launched = across.start_reduce_scatter(payload, layout, out, tag, mean=True, scratch=scratch)
        return self._finishing(launched)

    def spread_over_replicas_(self, tensor: Tensor, what: str) -> None:
        """Replace `tensor` by that of the first replica. `what` names the collective. Collective with replicas."""
        replicas = self._shards.replicas
        if replicas is None:
            return
        tag = self._next(what, 0)
        with self._agreeing():
            if tag is not None:
                self.collectives.check(tag)
            replicas.broadcast_(tensor)

    def exchange(
        self,
        sent: Tensor,
        sent_numels: Sequence[int],
        received: Tensor,
        received_numels: Sequence[int],
        what: str,
    ) -> None:
        """Exchange parts among the ranks that share the shards, see `Collectives.exchange`. Collective."""
        tag = self._next(what, 0)
        with self._agreeing():
            self._shards.exchange(sent, sent_numels, received, received_numels, tag)

    def all_gather_bytes_of_shards(self, data: bytes, what: str) -> list[bytes]:
        """The bytes of every rank that shares the shards, in their order; lengths may differ. Collective."""
        everything = self.all_gather_bytes(data, what)
        # Every replica has made the same: the first one speaks for all.
        ranks = self.ranks
        return [everything[ranks.index(rank)] for rank in self.rows[0]] if len(everything) > 1 else everything

    def agree(self, data: bytes, what: str, shown: str | None = None, remedy: str = _BUILD_ALIKE) -> None:
        """Raises DivergenceError unless every rank passes the same `data`. Collective.

        shown: text for the error in place of the bytes; the error shows the first line that differs.

        Ranks exchange digests, and the bytes only if these differ: a large model has many, times the number of ranks.
        """
        tag = self._next(what, 0)
        words = data if shown is None else shown.encode()
        with self._agreeing():
            digests = self.collectives.all_gather_bytes(sha256(data).digest(), tag)
            if len(set(digests)) == 1:
                return
            # All ranks have compared the same digests, so either all of them make this second exchange or none does.
            everything = self.collectives.all_gather_bytes(len(data).to_bytes(8, "little") + data + words)
        split = [(own[8:], int.from_bytes(own[:8], "little")) for own in everything]
        others = [own[:length] for own, length in split]
        different = [rank for rank, other in enumerate(others) if other != others[0]]
        if different:
            one, other = (split[rank][0][split[rank][1] :].decode(errors="replace") for rank in (0, different[0]))
            raise DivergenceError(
                f"{what} differs between rank 0 and rank {different[0]}: {first_difference(one, other)}. {remedy}"
            )

    def agree_on_names(self, names: Iterable[str]) -> list[str]:
        """The sorted union of every rank's names. Collective."""
        everything = self.all_gather_bytes("\n".join(names).encode(), "names of states")
        return sorted({name for one in everything for name in one.decode().split("\n") if name})

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Every rank's bytes, in rank order; lengths may differ. Collective."""
        tag = self._next(what, 0)
        with self._agreeing():
            return self.collectives.all_gather_bytes(data, tag)

    def restart(self, after_wrapping: bool = False) -> None:
        """Replace the process groups after a failure that every rank caught. Collective, over all parts.

        after_wrapping: the failure was in wrapping. The ranks of this part go on alone: others may have theirs wrapped.

        Raises RankLostError for a model of several parts of which a rank waits in a collective of torch's own, as
        inside of a forward, or has made others than its peers: they would be taken for those of another forward.
        """
        self._refuse_forked()
        if self.watch is not None:
            if after_wrapping:
                self.watch.narrow()
                self._keeps_parts = False
            elif self.is_divided:
                self._refuse_stuck(self.watch)
            self.watch.next_generation()
            # Ranks have failed at different points: tags that went on from there would differ in the first collective.
            self._last.restart()
            self._replay = ScheduleReplay()
            self._use(self._connection.replace(self._links))
            self.watch.failed = False
            if self.is_divided and not after_wrapping:
                for group in self._groups_of_parts():
                    group.replace()
                self._refuse_unequal_exchanges()

    def _groups_of_parts(self) -> list[PartsGroup]:
        return list({id(group): group for group in (self.parts, self._whole) if group is not None}.values())

    def _refuse_stuck(self, watch: Watchdog) -> None:
        """Raises RankLostError if a rank does not hear of the failure: it waits in a collective of torch's own."""
        unheard = [] if self._has_stages else watch.wait_until_heard(HEARS_WITHIN_S)
        if self._has_stages or unheard:
            who = f"rank {', '.join(map(str, unheard))}" if unheard else "ranks of other stages"
            words = f"{who} may wait in collectives of torch's own"
            raise RankLostError(f"{_CANNOT_GO_ON}{words}. {watch.failure_in_words()}")

    def _refuse_unequal_exchanges(self) -> None:
        """Raises RankLostError on all ranks unless all parts have made equally many collectives of torch's own.

        A rank that had launched one more would have it answered by the first one of the next forward.
        """
        groups: tuple[Any, ...] = self._exchanges
        try:
            own = [group._get_sequence_number_for_group() for group in groups]
        except RuntimeError:  # the backend does not count
            own = []
        every = self.everyone.all_gather_bytes(json.dumps(own).encode(), "collectives of torch's own")
        of_parts = [every[place :: self.world_size] for place in range(self.world_size)]
        if not own or any(len(set(its)) > 1 for its in of_parts):
            raise RankLostError(f"{_CANNOT_GO_ON}its parts have failed in different collectives of torch's own")

    def _lost_connection(self, error: BaseException) -> bool:
        """Whether the model has other parts, and a collective with these has ended because a rank is gone."""
        is_lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        return is_lost and self.is_divided and not isinstance(error, GeminiError)

    def cause_of(self, error: BaseException) -> GeminiError | None:
        """Why a collective of torch's own has ended with `error` in a model of several parts; None: it was no such.

        The ranks of other parts wait there for one that has failed, and learn from gloo or NCCL that it is gone.
        """
        if not self._lost_connection(error) or self.watch is None:
            return None
        try:
            self.watch.raise_cause(error)
        except GeminiError as cause:
            return cause

    def close(self) -> None:
        """Give the process group back, with its threads and sockets. Collective, except after a failure."""
        if self._connection.is_open and self.watch is not None and not self.watch.failed:
            self.drop_pass()
            self._end_dropped()
        has_failed = not self._keeps_parts or (self.watch is not None and self.watch.failed)
        self._use(self._connection.close(self._links))
        for group in self._groups_of_parts():
            group.close(has_failed)
        self.parts = self._whole = None
        self.everyone = self

    def _end_dropped(self) -> None:
        """End the groups of models that were dropped without `close()`. Collective. See [Note: Dropped groups]."""
        if self.watch is not None:
            everything = self.all_gather_bytes("\n".join(dropped()).encode(), "dropped models")
            end_dropped(
                {rank: set(names.decode().split("\n")) for rank, names in zip(self.ranks, everything, strict=True)}
            )

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Around a block: an exception that leaves it is published to the other ranks."""
        try:
            yield
        except BaseException as error:
            self.publish(error)
            raise

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. Local."""
        if self.heard:
            self.heard.tell(Failed(words_of(error), lacks_memory(error)))
        # All ranks refuse it alike, before anything has changed: the step may follow.
        if isinstance(error, UpdatedInBackwardError):
            return
        # Whose end that was is the failure: see `cause_of`.
        if self._lost_connection(error) and self.watch is not None:
            self.watch.failed = True
            return
        # The failure of a forked child (a DataLoader worker) is not the failure of its rank.
        if self.watch is not None and self._process == os.getpid():
            self.watch.publish(error)

    def _next(self, what: str, chunk: int) -> Tag | None:
        """The tag of the next collective; None if ranks have agreed on it already."""
        tag = self._tag(what, chunk)
        followed = self._replay.follows
        agreed = self._replay.matches(Collective(tag.chunk >> KIND_SHIFT, chunk, tag.moment))
        # This rank is about to leave the schedule. In the store it learns whether all ranks do; see [Note: Following].
        if followed and not agreed and self.watch is not None:
            self.watch.meet()
        return None if agreed else tag

    def _tag(self, what: str, chunk: int) -> Tag:
        if self._process != os.getpid():
            self._refuse_forked()
        kind = KINDS.index(what) if what in KINDS else len(KINDS)
        moment = self.position.now
        sequence = self._last.begin(what, chunk, moment)
        self._met = self._tell(what, chunk) if self.heard else None
        return Tag(self.plan_hash, sequence & 0xFFFFFFFF, kind << KIND_SHIFT | chunk, moment)

    def _tell(self, what: str, chunk: int) -> Met:
        """Tell of a collective that is about to be launched."""
        now = perf_counter()
        met = Met(what, chunk, self.position.now, self.collectives.bytes_sent, now, now)
        self.heard.tell(met)
        return met

    def _refuse_forked(self) -> None:
        """Raises UnsupportedError in a forked child: it has the sockets, but not the threads that serve them."""
        if self._process != os.getpid() and self.watch is not None:
            raise UnsupportedError(
                f"this process was forked from rank {self.watch.rank} and cannot fetch a sharded parameter, which "
                "takes all ranks. In a DataLoader's dataset or collate_fn, use copies of what is needed "
                "(model.state_dict() before the workers start), or num_workers=0"
            )

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Around a collective: tags that differ become a DivergenceError on every rank."""
        try:
            # gloo keeps this thread's saved-tensor hooks, and through them the model, alive with the work.
            with unhooked():
                yield
        except TagMismatch as mismatch:
            raise self._refusal(mismatch) from None
        if self._met is not None:
            self._met.end()

    def _refusal(self, mismatch: TagMismatch) -> DivergenceError:
        """The error for tags that differ, which the other ranks are told."""
        error = self._diverged(mismatch)
        if self.watch is not None:
            self.watch.publish(error)
        return error

    def _diverged(self, mismatch: TagMismatch) -> DivergenceError:
        found = mismatch.found
        if len(found) < self.world_size:
            # Tags that travelled beside a payload are of the ranks that share the shards, or a second copy, in order.
            rows = [row for row in (*self.rows, *self._nearby) if len(row) == len(found)]
            row = next(row for row in rows if dist.get_rank() in row)
            found = {self.ranks.index(row[rank]): tag for rank, tag in found.items()}
        places = {
            rank: f"{self.position.describe(tag.moment)} with the {tag_in_words(tag)} (collective "
            f"{tag.sequence}{'' if tag.plan_hash == self.plan_hash else ', another plan'})"
            for rank, tag in sorted(found.items())
        }
        words = "; ".join(f"rank {rank} was at {place}" for rank, place in places.items())
        return DivergenceError(f"ranks took different ways: {words}. {advice(places)}")
