"""Gradients over ranks: in place, by a receive buffer, in tiles, and later for those under no_sync()."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gemini.errors import GeminiError
from gemini.memory.memory import HostSums
from gemini.memory.transfer import Region, Scratch, Transfer, ready, wait_on_host, wait_on_stream
from gemini.observe import OpenMove
from gemini.placement.demand import Tier
from gemini.placement.needs import largest_tile
from gemini.placement.next_use import NextUse, PassKind, Phase, ReductionOrder, Touch
from gemini.ranks.communicator import Communicator
from gemini.runtime.chunk import Chunk
from gemini.runtime.grad_homes import GradHomes, GradMemory
from gemini.runtime.gradient import ChunkGradient, GradState, UnsyncedState
from gemini.settings import dtype_of
from sharding import Piece, ShardLayout, Unit, pieces_within

# -- Turns the gradients of autograd into one reduced gradient a step. The number of ranks selects one of two ways.
#
# `AccumulateInPlace`: one rank adds gradients in autograd's own order and has nothing to agree on.
# `AccumulateAndReduce`: several ranks reduce every micro-batch at once.
#
# Both only name the gradients to reduce, and hand back each reduction. `Reductions` in runtime/step.py finishes it, and
# decides what becomes of the mean: it comes to rest, or the backward updates the weights with it.


class Reduction(NamedTuple):
    """A reduction of a chunk's gradient that was started and not finished."""

    gradient: ChunkGradient
    # Waits for the mean over ranks: (optim_numel,) on the device, valid until the next reduction begins.
    mean: Callable[[], Region]
    backward: int  # its number within the step
    moving: OpenMove  # one more block, in which the mean leaves


@dataclass(eq=False, repr=False)
class Accumulation:
    """The interface of both ways to the gradient store. `backward` is the number of a backward within its step."""

    _memory: GradMemory
    _homes: GradHomes
    _scratch: Scratch
    _communicator: Communicator

    knows_all: ClassVar = True  # this rank's gradients are all there are

    def __post_init__(self) -> None:
        self.synchronizes = True  # False inside no_sync()
        self.awaits_reduction = False  # gradients from under no_sync() are left; equal on all ranks
        self.uses_up = False  # the running backward, or the last one, updates weights with its gradients
        self._reduced: set[int] = set()  # chunks reduced in this backward, by index: membership only

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """A context in which backwards add gradients up on this rank and reduce none. Local."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            # The old value is restored, since a no_sync() may stand inside another.
            self.synchronizes = before

    def note_placement(self, is_resident: bool) -> None:
        """is_resident: no payload leaves between forward and update."""

    def begin_backward(self, uses_up: bool) -> None:
        """A backward starts. Local. uses_up: it updates weights with its gradients."""
        self._reduced.clear()
        self.uses_up = uses_up

    def is_in_the_way(self, gradient: ChunkGradient) -> bool:
        """Whether the reduction in flight must be finished before this gradient can be opened. Local."""
        return False

    def arrived(self, gradient: ChunkGradient) -> Iterable[ChunkGradient]:
        """Some of the chunk's gradients were copied into its payload. Returns what is to be reduced now.

        The caller reduces each gradient before it asks for the next one, here and below. Collective then.
        """
        return ()

    def due(self) -> Sequence[int]:
        """Chunks, by index, that all ranks reduce before the next fetch in backward. Collective while recording."""
        return ()

    def start(self, gradient: ChunkGradient, backward: int) -> Reduction | None:
        """Start to reduce a chunk's open gradient (zeros if this rank has none) to the mean over ranks. Collective.

        The reduction in flight must be finished: both use the same scratch. Returns a reduction that must be finished
        at once; another one is in flight, or came to rest in here, tile by tile.
        """
        raise NotImplementedError

    def in_flight(self) -> Reduction | None:
        """Take out the reduction in flight, to be finished. Local."""
        return None

    def left_in_order(self) -> Iterator[ChunkGradient]:
        """The backward ends: gradients whose turn all ranks know, to be reduced. Collective. `left_open` is next."""
        return iter(())

    def left_open(self, backward: int) -> Iterator[ChunkGradient]:
        """The backward ends: every gradient that is open on any rank, to be reduced. Collective.

        If the backward updates weights no reduction is in flight: ranks tell one another what they have used up.
        """
        return iter(())

    def end_backward(self, backward: int) -> None:
        """All gradients of the backward are reduced. Collective if it was not as recorded."""

    def left_unsynced(self) -> Iterator[ChunkGradient]:
        """What backwards under no_sync() have left (`awaits_reduction`), to be reduced. Collective."""
        return iter(())

    def end_step(self, has_zeros: bool) -> None:
        """Forget the step's gradients: they were used, discarded or zeroed, or their reduction has failed. Local."""

    def reset_order(self) -> None:
        """Forget which gradients to expect, and when: other chunks are trained. Local."""

    def _expect_what_came(self, gradient: ChunkGradient) -> None:
        """The step's first backward has brought these gradients: later ones are expected to bring as many."""
        # A backward that updates uses a chunk up once it is whole. With one of its gradients, of which nothing came
        # for once, it would not be.
        if not self.uses_up or any(gradient.got):
            gradient.expect_what_came()


class AccumulateInPlace(Accumulation):
    """One rank: its gradient is the mean.

    Where the home is on the device in full precision, gradients are written and added there. Others are opened in a
    slot and merged into the home when they are complete. no_sync() changes no value.
    """

    def arrived(self, gradient: ChunkGradient) -> Iterable[ChunkGradient]:
        """See `Accumulation`. Pieces are added in their own dtype first, as by autograd, so they wait for the end."""
        if gradient.chunk.index in self._reduced:
            # A piece came after the chunk was merged in this backward, as reentrant checkpointing does.
            gradient.in_pieces = True
        # A gradient at home takes no slot and needs no merge: it comes to rest at the end of the backward.
        elif gradient.num_fired == gradient.expected and gradient.state is GradState.IN_SLOT:
            if not gradient.in_pieces:
                return (gradient,)
        return ()

    def start(self, gradient: ChunkGradient, backward: int) -> Reduction:
        """See `Accumulation`. The gradient is the mean. Local."""
        chunk, memory = gradient.chunk, self._memory
        self._reduced.add(chunk.index)
        # The gradient may have been spilled: bring it back into a slot.
        memory.open(gradient, backward)
        memory.complete(gradient)
        # This orders what is rounded next behind the copies of the last merge out of this memory.
        self._scratch.reset()
        moving = memory.moving(gradient, self._communicator.position.here, blocks=1)
        return Reduction(gradient, partial(self._narrowed, gradient), backward, moving)

    def _narrowed(self, gradient: ChunkGradient) -> Region:
        """The payload, in the dtype in which the gradient rests, which may be narrower."""
        chunk, payload = gradient.chunk, gradient.payload
        assert payload is not None
        if not chunk.narrows:
            return payload
        rounded = self._scratch.region(payload.numel, chunk.gradient_dtype)
        rounded.flat.copy_(payload.flat)
        return rounded

    def left_open(self, backward: int) -> Iterator[ChunkGradient]:
        """See `Accumulation`."""
        for gradient in self._memory.gradients.values():
            # Chunks without a gradient are left alone: on one rank nobody else needs zeros of them.
            if gradient.state is GradState.AT_HOME:
                self._memory.rest_in_place(gradient, backward)
            elif gradient.is_open:
                yield gradient
            # `got` counts since the last step: only in the first backward does it tell what one backward brings.
            if backward == 1 and self.synchronizes:
                # Unused parameters must not keep the chunk open, and its slot taken, until the end of later backwards.
                self._expect_what_came(gradient)


# -- Agrees on which gradients are complete on every rank, while a backward is recorded.
#
# [Note: News] Ranks ask at every touch. A message about every chunk at each touch would cost the square of the number
# of chunks, so a rank sends only what has changed since the last touch. Mostly the news is equal on all ranks, which a
# digest of fixed size shows. Only where digests differ do ranks send the news itself. Each rank then counts, by chunk,
# how many ranks have its gradient complete.


_WHAT = "agreement on complete gradients"
_DIGEST_WORDS = 2


class Completion:
    """The complete gradients of one backward of one model, on several ranks."""

    def __init__(self, memory: GradMemory, communicator: Communicator) -> None:
        self._memory = memory
        self._communicator = communicator
        self._changed: dict[int, None] = {}  # chunks whose gradient may have become complete or incomplete
        self._told: dict[int, None] = {}  # chunks that this rank last reported as complete
        self._num_ranks: dict[int, int] = {}  # by chunk: ranks that last reported it complete; equal on all ranks
        self._asked = False

    def begin(self) -> None:
        """A backward starts."""
        self._asked = False
        self._changed.clear()
        self._told.clear()
        self._num_ranks.clear()

    def note(self, index: int) -> None:
        """The chunk got a gradient with which it has all that it expects, or more. Local."""
        self._changed[index] = None

    def note_all(self) -> None:
        """Gradients were discarded, so complete ones may be incomplete now. Local."""
        self._changed.update(self._told)

    def note_reduced(self, index: int) -> None:
        """The chunk's gradient is being reduced. Every rank calls it at the same point."""
        self._told.pop(index, None)
        self._num_ranks.pop(index, None)

    def agree(self) -> list[int]:
        """Chunks whose open gradient is complete on every rank, in the model's order. Collective."""
        news = self._news()
        digest = array("q", blake2b(news.tobytes(), digest_size=8 * _DIGEST_WORDS).digest()).tolist()
        # One all-reduce gives maximum and minimum: the largest complement is that of the smallest word.
        words = [*digest, *(~word for word in digest)]
        packed_words = torch.tensor(words, dtype=torch.int64, device=self._communicator.device)
        self._communicator.all_reduce_max_(packed_words, _WHAT)
        # The host waits for the device here, at each touch, but only in backwards that are recorded.
        agreed: list[int] = packed_words.tolist()
        world_size = self._communicator.world_size
        # Maximum and minimum of each word are equal: all ranks have the same news.
        if all(agreed[i] == ~agreed[i + _DIGEST_WORDS] for i in range(_DIGEST_WORDS)):
            of_ranks = [news] * world_size
        else:
            of_ranks = [array("q", sent) for sent in self._communicator.all_gather_bytes(news.tobytes(), _WHAT)]
        for its_news in of_ranks:
            for word in its_news:
                index, is_complete = divmod(word, 2)
                self._num_ranks[index] = self._num_ranks.get(index, 0) + (1 if is_complete else -1)
        # A chunk can have become complete everywhere only by news of some rank, so the others need no look.
        touched = sorted({word // 2 for its_news in of_ranks for word in its_news})
        return [index for index in touched if self._num_ranks[index] == world_size]

    def _news(self) -> array[int]:
        """Words of each chunk that became complete or incomplete: two times its index, plus 1 if it is complete."""
        gradients = self._memory.gradients
        if self._asked:
            suspects = sorted(self._changed)
        # First question of this backward: earlier touches may have followed the schedule without asking, and an
        # interrupted backward may have left gradients.
        else:
            suspects = sorted(gradients)
        self._asked = True
        self._changed.clear()
        news = array("q")
        for index in suspects:
            is_complete = _is_complete(gradients[index])
            # A suspect whose state this rank has told already is no news.
            if is_complete == (index in self._told):
                continue
            news.append(2 * index + is_complete)
            if is_complete:
                self._told[index] = None
            else:
                del self._told[index]
        return news


def _is_complete(gradient: ChunkGradient) -> bool:
    return gradient.is_open and gradient.num_fired == gradient.expected


# -- Reduces a gradient over ranks tile by tile, where scratch has no room for the whole exchange.
#
# See [Note: Tiles] in placement/needs.py. A tile has the same elements of every rank's shard.


def reduce_in_tiles(
    chunk: Chunk,
    target: Region,
    fill: Callable[[Region, int, int], None],
    *,
    travel: torch.dtype,
    rest: torch.dtype,
    replaces: bool,
    homes: GradHomes,
    scratch: Scratch,
    communicator: Communicator,
) -> None:
    """Set `target` to the mean over ranks if `replaces`, else add the mean to it. Collective.

    target: (optim_numel,), the chunk's reduced gradient. fill: `fill(rows, start, numel)` writes elements
    [start, start + numel) of every rank's shard of this rank's gradient to `rows`, (world_size * numel,), one rank
    after the other. travel, rest: the dtypes of `rows`, and of the mean before it comes to `target`.
    """
    world_size, shard_numel = chunk.layout.world_size, chunk.layout.shard_numel
    facts = dtype_of(travel), dtype_of(rest), chunk.is_stepped_whole, chunk.layout
    tile_numel = largest_tile(*facts, scratch.num_bytes)
    for start in range(0, shard_numel, tile_numel):
        # The last tile, too, has a multiple of `ALIGNMENT` elements, because shards have.
        numel = min(tile_numel, shard_numel - start)
        layout = ShardLayout((Unit(0, numel * world_size),), world_size)
        scratch.reset()
        rows = scratch.region(layout.numel, travel)
        fill(rows, start, numel)
        out = scratch.region(numel, rest)
        # The exchange is finished at once, because the next tile uses the same scratch.
        communicator.start_reduce_scatter(rows.flat, layout, out.flat, chunk.index, scratch.allocate)()
        if not chunk.is_stepped_whole:
            homes.put(target[start : start + numel], out, replaces)
            continue
        # Every rank steps the whole chunk: gather the tile's means.
        whole = scratch.region(layout.numel, rest)
        communicator.all_gather(whole.flat, out.flat, layout, chunk.index)
        # Row r has the mean of rank r's shard, whose slices of several units lie apart in the payload.
        for rank in range(world_size):
            row = whole[rank * numel : (rank + 1) * numel]
            for piece in pieces_within(chunk.layout.slices(rank), start, numel):
                homes.put(target[piece.in_payload], row[in_tile(piece, start)], replaces)


def fill_from(payload: Tensor, chunk: Chunk) -> Callable[[Region, int, int], None]:
    """The `fill` of `reduce_in_tiles` for a gradient that lies whole in `payload`, (numel,), on the device."""
    world_size = chunk.layout.world_size

    def fill(rows: Region, start: int, numel: int) -> None:
        by_rank = rows.flat.view(world_size, numel)
        # Every rank's slice of a unit has one size and one place in its shard, so those of rank 0 stand for all.
        for unit, own in zip(chunk.layout.units, chunk.layout.slices(0), strict=True):
            for piece in pieces_within((own,), start, numel):
                first = piece.payload_start - unit.start
                region = payload[unit.start : unit.start + unit.numel].view(world_size, -1)
                by_rank[:, in_tile(piece, start)].copy_(region[:, first : first + piece.numel])

    return fill


def in_tile(piece: Piece, start: int) -> slice:
    """The piece's elements in a tile that begins with element `start` of the shard."""
    return slice(piece.shard_start - start, piece.shard_start - start + piece.numel)


# -- Gradients under no_sync(): sums of whole, unreduced gradients on the host, and their reduction later.
#
# A sum is made in fp32 (fp64 for fp64 weights): in 16 bits a small gradient would be lost beside a large one. So it
# also travels in fp32, unless the user gave a `reduce_dtype`, and rests in fp32, unless the user gave an
# `accumulate_dtype`. A 16-bit chunk has no memory on the device for its whole gradient in fp32, so it is exchanged in
# tiles that fit into the scratch of ordinary reductions. Ranks agree on all of that, since `ChunkGradient.is_behind`
# follows from the backwards that all ranks run.


def keep_unsynced(gradient: ChunkGradient, backward: int, memory: GradMemory, sums: HostSums) -> None:
    """Add an open local gradient of backward number `backward` to the chunk's sum on the host. Local."""
    chunk, all_memory = gradient.chunk, memory.memory
    # The gradient may have been spilled: bring it back into a slot.
    memory.open(gradient, backward)
    assert gradient.payload is not None
    memory.complete(gradient)
    total = gradient.unsynced
    if total is None:
        dtype = torch.float64 if chunk.dtype is torch.float64 else torch.float32
        total = all_memory.allocate(Tier.HOST, chunk.numel, dtype, "unsynced gradients")
        gradient.unsynced = total
    # The host adds, in fp32: the sum never travels to the device before it is reduced. Its memory is kept from step to
    # step: the first gradient of a step overwrites an old sum.
    is_first = gradient.unsynced_state is not UnsyncedState.HELD
    sums.put(total, gradient.payload, replaces=is_first)
    if is_first:
        gradient.become_unsynced(UnsyncedState.HELD)
    memory.close(gradient)


def reduce_unsynced(
    gradient: ChunkGradient, backward: int, homes: GradHomes, scratch: Scratch, communicator: Communicator
) -> None:
    """Reduce the chunk's sums over ranks and merge the mean, tile by tile. Collective."""
    chunk = gradient.chunk
    is_first = homes.begin(gradient, backward, is_sum=True)
    total = gradient.reduced()
    reduce_in_tiles(
        chunk,
        total,
        partial(_fill, gradient, homes.transfer),
        travel=chunk.sum_dtype,
        rest=total.dtype,
        replaces=is_first,
        homes=homes,
        scratch=scratch,
        communicator=communicator,
    )
    gradient.become_unsynced(UnsyncedState.NONE)


def _fill(gradient: ChunkGradient, transfer: Transfer, rows: Region, start: int, numel: int) -> None:
    """Fill `rows`, (world_size * numel,), with elements [start, start + numel) of every rank's shard of the sum."""
    if gradient.unsynced_state is not UnsyncedState.HELD:
        # Only other ranks have unsynced gradients of this chunk.
        rows.flat.zero_()
        return
    assert gradient.unsynced is not None
    chunk = gradient.chunk
    casts: list[Region] = []
    for rank in range(chunk.layout.world_size):
        row = rows[rank * numel : (rank + 1) * numel]
        for piece in pieces_within(chunk.layout.slices(rank), start, numel):
            part = gradient.unsynced[piece.in_payload]
            if part.dtype is not rows.dtype:
                part = Region(Tier.HOST, ready(part).to(rows.dtype))
                casts.append(part)
            transfer.copy(row[in_tile(piece, start)], part)
    wait_on_host(*casts)  # the casts are dropped at return
    wait_on_stream(rows)


# -- Gradients of several ranks: sends each chunk's gradient to the other ranks, and the mean into its home.
#
# Which gradients a rank gets, and when, may depend on its data; collectives may not. All ranks reduce a chunk at the
# same point (see placement/next_use.py), and at the end of a backward whatever is open on any rank.
#
# A reduction is first only started. It is finished when the next one starts, when its slot is wanted, or when the
# backward ends. The mean is made in fp32 (fp64 for fp64) and rounded once, to the dtype in which the gradient rests.


@dataclass(eq=False, repr=False)
class AccumulateAndReduce(Accumulation):
    """Several ranks: every chunk's gradient is reduced as soon as all ranks have it, in one order.

    If backward gathers parameters, ranks reduce before a certain fetch. If not, the order of reductions is all they
    share.
    """

    _next_use: NextUse
    _stage: int

    knows_all: ClassVar = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._completion = Completion(self._memory, self._communicator)
        self._in_flight: Reduction | None = None
        self._gathers_in_backward = False  # until there is a placement
        self._next_in_order = 0
        self._off_plan = False  # a gradient came late or early: record again
        self._is_to_agree = False  # this backward has left the plan, on some rank
        self._missing: dict[int, bytes] = {}  # by chunk that was reduced in this backward: see `ChunkGradient.missing`
        self.reset_order()

    def note_placement(self, is_resident: bool) -> None:
        """See `Accumulation`."""
        self._gathers_in_backward = self._stage == 3 and not is_resident

    def reset_order(self) -> None:
        """See `Accumulation`."""
        self._order = ReductionOrder[Touch](list(self._memory.gradients))
        self._has_told_parts = False

    def begin_backward(self, uses_up: bool) -> None:
        """See `Accumulation`."""
        super().begin_backward(uses_up)
        self._missing.clear()
        next_use = self._next_use
        self._order.begin(next_use.places if next_use.kind is PassKind.TRAINING else None)
        self._completion.begin()
        self._next_in_order = 0
        self._off_plan = self._is_to_agree = False

    def is_in_the_way(self, gradient: ChunkGradient) -> bool:
        """See `Accumulation`. The reduction in flight may be this chunk's, or hold the last slot."""
        if self._in_flight is None:
            return False
        return gradient.state is GradState.REDUCING or (gradient.payload is None and self._memory.lacks_slot(gradient))

    def arrived(self, gradient: ChunkGradient) -> Iterable[ChunkGradient]:
        """See `Accumulation`."""
        index, order = gradient.chunk.index, self._order
        # The number of touches before this gradient: the chunk may be reduced from the next touch on.
        order.last_fire[index] = len(self._next_use.passed)
        # More than what is expected may come: in the step's first backward some of the parameters may have been idle.
        if gradient.num_fired >= gradient.expected:
            self._completion.note(index)
        if index in self._reduced:
            # A piece came after the chunk was reduced: it is reduced by itself at the end, and the recorded point is
            # too early.
            self._off_plan = True
            gradient.in_pieces = True
        elif gradient.num_fired == gradient.expected:
            order.note_complete(index)
            if self.synchronizes and not self._gathers_in_backward and self._knows_parts:
                return self._in_order()
        return ()

    @property
    def _knows_parts(self) -> bool:
        """Ranks know whose gradients come in part, which decides about updates inside the backward."""
        return self._has_told_parts or not self.uses_up

    def _in_order(self) -> Iterator[ChunkGradient]:
        """Complete gradients whose turn it is, to be reduced."""
        order, position = self._order.order, self._communicator.position
        before = position.now
        # Ranks may be at different operators here, and the position travels in the tags: use one that all share.
        position.set(0, Phase.BACKWARD)
        while self._next_in_order < len(order):
            gradient = self._memory.gradients[order[self._next_in_order]]
            if not gradient.is_open or gradient.num_fired != gradient.expected:
                break
            yield gradient
            self._next_in_order += 1
        position.return_to(before)

    def due(self) -> Sequence[int]:
        """See `Accumulation`. If backward gathers parameters, fetches are points that all ranks share."""
        if not (self._gathers_in_backward and self.synchronizes):
            return ()
        if self._order.points is not None and self._is_as_recorded():
            return [index for index in self._order.due(self._next_use.position) if index not in self._reduced]
        return self._completion.agree()

    def _is_as_recorded(self) -> bool:
        """Whether this pass has had the recorded touches only, so that gradients come by their recorded points."""
        return self._next_use.is_in_order and self._next_use.kind is PassKind.TRAINING

    def start(self, gradient: ChunkGradient, backward: int) -> Reduction | None:
        """See `Accumulation`. The exchange is only launched."""
        self._reduced.add(gradient.chunk.index)
        if self.uses_up:
            self._note_missing(gradient)
        self._completion.note_reduced(gradient.chunk.index)
        if gradient.unsynced_state is not UnsyncedState.NONE:
            # The sum under no_sync() is whole and unreduced: this gradient is added to it, and both are reduced as one.
            if gradient.is_open:
                keep_unsynced(gradient, backward, self._memory, self._homes.sums)
            reduce_unsynced(gradient, backward, self._homes, self._scratch, self._communicator)
            return None
        # A rank without a gradient of this chunk takes part all the same: `open` gives it a payload, and `complete`
        # zeros it.
        self._memory.open(gradient, backward)
        self._memory.complete(gradient)
        if gradient.chunk.exchange_bytes > self._scratch.num_bytes:
            self._reduce_in_tiles(gradient, backward)
            return None
        self._scratch.reset()
        moving = self._memory.moving(gradient, self._communicator.position.here, blocks=2)
        with moving:
            mean = self._launch(gradient)
        self._in_flight = Reduction(gradient, mean, backward, moving)
        # At stage 0 finishing is a collective (an all-gather): it must not wait for a point that is this rank's alone.
        return self.in_flight() if self._stage == 0 else None

    def _reduce_in_tiles(self, gradient: ChunkGradient, backward: int) -> None:
        """Reduce the open payload to the end. Collective.

        Each tile is a collective: the later ones must not wait for a point that is this rank's alone.
        """
        chunk, whole = gradient.chunk, gradient.payload
        assert whole is not None
        with self._memory.moving(gradient, self._communicator.position.here, blocks=1):
            self._homes.before_reduction(chunk)
            self._memory.begin_reduction(gradient)
            # Where gradients are written to the home, the mean of a tile replaces elements that were sent before.
            is_first = self._homes.begin(gradient, backward)
            reduce_in_tiles(
                chunk,
                gradient.reduced(),
                fill_from(whole.flat, chunk),
                travel=chunk.travel_dtype,
                rest=chunk.gradient_dtype,
                replaces=is_first,
                homes=self._homes,
                scratch=self._scratch,
                communicator=self._communicator,
            )
            self._memory.close(gradient)

    def _launch(self, gradient: ChunkGradient) -> Callable[[], Region]:
        """Start the exchange; the returned function waits for the mean. Collective."""
        chunk, whole, scratch = gradient.chunk, gradient.payload, self._scratch
        assert whole is not None
        payload = whole.flat
        self._homes.before_reduction(chunk)
        rests_as_is = chunk.gradient_dtype is chunk.dtype
        # At stage 0 the mean is gathered whole in the dtype in which it rests, which is not that of the payload here.
        if self._stage == 0 and not rests_as_is:
            whole = scratch.region(chunk.numel, chunk.gradient_dtype)
        in_place = gradient.state is GradState.AT_HOME or self._stage == 0
        # This rank's slice of the payload is where the mean rests: the exchange writes it there. Slices of several
        # units are not contiguous.
        if in_place and len(chunk.layout.units) == 1:
            begin = chunk.layout.slices(chunk.rank)[0].payload_start
            out = whole[begin : begin + chunk.layout.shard_numel]
        else:
            out = scratch.region(chunk.layout.shard_numel, chunk.gradient_dtype)
        # `reduce_dtype=`: the gradient travels as a cast copy.
        if chunk.travel_dtype is not chunk.dtype:
            payload = scratch.allocate(chunk.numel, chunk.travel_dtype).copy_(payload)
        finish = self._communicator.start_reduce_scatter(payload, chunk.layout, out.flat, chunk.index, scratch.allocate)
        self._memory.begin_reduction(gradient)

        def mean() -> Region:
            finish()
            if self._stage > 0:
                return out
            self._communicator.all_gather(whole.flat, out.flat, chunk.layout, chunk.index)
            return whole

        return mean

    def in_flight(self) -> Reduction | None:
        """See `Accumulation`. After a failure it must not be finished twice."""
        flight, self._in_flight = self._in_flight, None
        return flight

    def left_in_order(self) -> Iterator[ChunkGradient]:
        """See `Accumulation`. They are reduced with zeros where some gradients did not come."""
        if self.synchronizes and not self._gathers_in_backward and self._knows_parts:
            for index in self._order.order[self._next_in_order :]:
                yield self._memory.gradients[index]

    def left_open(self, backward: int) -> Iterator[ChunkGradient]:
        """See `Accumulation`."""
        gradients, order = list(self._memory.gradients.values()), self._order
        if not self.synchronizes:
            for gradient in gradients:
                if gradient.is_open:
                    keep_unsynced(gradient, backward, self._memory, self._homes.sums)
                # Other ranks may have left something: this rank takes part in its reduction later, with zeros.
                elif not gradient.is_behind:
                    gradient.become_unsynced(UnsyncedState.ELSEWHERE)
            self.awaits_reduction = True
            order.note_unsynced(as_expected=self._is_as_recorded() or not self._gathers_in_backward)
            return
        if self._gathers_in_backward:
            off = self._off_plan or not self._is_as_recorded()
        else:
            # Nothing is gathered, so the order of reductions is all that ranks share. Another order on one rank makes
            # all ranks agree on an order again.
            off = self._off_plan or tuple(order.fired) != order.order
        # Before the first record no rank has points: then every backward counts as off its plan.
        is_off = yield from self._the_rest("end of backward", off or order.points is None)
        # A backward that follows no forward of the model has a trace of its own, in which points mean nothing.
        self._is_to_agree = is_off and not (self._gathers_in_backward and self._next_use.kind is not PassKind.TRAINING)

    def end_backward(self, backward: int) -> None:
        """See `Accumulation`. If this backward left the plan, ranks agree on the points of the next one."""
        if not self._is_to_agree:
            return
        # This backward was not the recorded one: the next one follows what it has shown.
        self._agree_on_points()
        for gradient in self._memory.gradients.values():
            # Unused parameters must not keep a chunk open next time. If routing chooses the parameters that are used,
            # all are still expected: a gradient that came late on some ranks only would be added in another order.
            if backward == 1 and not gradient.chunk.is_chosen:
                self._expect_what_came(gradient)

    def left_unsynced(self) -> Iterator[ChunkGradient]:
        """See `Accumulation`."""
        yield from self._the_rest("unsynced gradients")

    def _the_rest(self, when: str, off: bool = False) -> Generator[ChunkGradient, None, bool]:
        """What is open or unsynced on any rank. Returns whether some rank is `off` its plan. Collective.

        The all-reduce also carries which parameters have a gradient on any rank. So `.grad is None` has the same answer
        on all ranks and costs no collective of its own.
        """
        gradients = list(self._memory.gradients.values())
        own = bytearray([off, *(g.is_open or g.unsynced_state is UnsyncedState.HELD for g in gradients)])
        for gradient in gradients:
            own += gradient.got
        uses_up = self.uses_up
        if uses_up:
            for gradient in gradients:
                self._note_missing(gradient)
                own += self._missing[gradient.chunk.index]
            own += bytes(sum(self._missing[g.chunk.index]) < g.num_trained for g in gradients)
            own += bytes(g.is_used for g in gradients)
        words = torch.frombuffer(own, dtype=torch.uint8).to(self._communicator.device)
        # One byte a flag, in one all-reduce: off | chunk to be reduced, by chunk | parameter has a gradient, by chunk |
        # where the backward updates: parameter lacks a gradient, by chunk | chunk has some gradient | chunk is updated.
        self._communicator.all_reduce_max_(words, when)
        # Reading the flags makes the host wait for the device.
        agreed: bytes = words.cpu().numpy().tobytes()
        start = len(gradients) + 1
        if uses_up:
            self._note_parts(gradients, agreed[start + sum(len(gradient.got) for gradient in gradients) :])
        for number, gradient in enumerate(gradients):
            end = start + len(gradient.got)
            gradient.note_agreed(agreed[start:end])
            start = end
            if agreed[number + 1]:
                yield gradient
            # Where some rank held a sum its reduction has ended this state. Here no rank held one.
            if self.awaits_reduction and gradient.is_behind:
                gradient.become_unsynced(UnsyncedState.NONE)
        self.awaits_reduction = False
        return bool(agreed[0])

    def _note_missing(self, gradient: ChunkGradient) -> None:
        """Note which gradients this backward has not brought to this rank, before the payload is closed. Local."""
        index, missing = gradient.chunk.index, gradient.missing
        before = self._missing.get(index)  # what comes in pieces is reduced several times
        self._missing[index] = missing if before is None else bytes(map(min, before, missing))

    def _note_parts(self, gradients: Sequence[ChunkGradient], agreed: bytes) -> None:
        """Note whose gradients have come in part, where the backward updates. Equal on all ranks.

        agreed: what `_the_rest` has exchanged for it. Raises GeminiError on all ranks if some have updated a
        chunk of which others had a part.
        """
        count, is_first, start = len(gradients), not self._has_told_parts, 0
        have_some, are_used = agreed[-2 * count : -count], agreed[-count:]
        self._has_told_parts = True
        for gradient, has_some, is_used in zip(gradients, have_some, are_used, strict=True):
            missing = agreed[start : start + len(gradient.got)]
            start += len(gradient.got)
            if is_used and any(missing):
                raise GeminiError(
                    f"no gradient of {gradient.chunk.parameters[missing.index(1)].name!r} came in this backward, as in "
                    "all before, and other ranks have updated its chunk: wrap the model without update_in_backward=True"
                )
            # A branch that all ranks alike leave out for once is no part. One that none has used so far may be: the
            # data of one rank may choose it.
            if any(missing) and (has_some or is_first):
                gradient.note_part()

    def _agree_on_points(self) -> None:
        """Adopt the latest point and rank of each chunk over all ranks. Collective."""
        order = self._order
        points = [order.last_fire[i] for i in order.chunks]
        points_and_ranking = torch.tensor(points + order.ranking(), dtype=torch.int64, device=self._communicator.device)
        self._communicator.all_reduce_max_(points_and_ranking, "points of reduction")
        agreed: list[int] = points_and_ranking.tolist()
        order.adopt(agreed[: len(points)], agreed[len(points) :], self._next_use.passed)

    def end_step(self, has_zeros: bool) -> None:
        """See `Accumulation`. If zeros are needed, ranks still agree on which parameters had a gradient."""
        # A reduction is in flight here only after a failure, or inside a backward.
        self._in_flight = None
        self._completion.note_all()
        is_behind = any(gradient.is_behind for gradient in self._memory.gradients.values())
        self.awaits_reduction = is_behind or (has_zeros and self.awaits_reduction)
