"""When each chunk's gradient is reduced, so that every rank does it at the same point of the backward.

Which gradients a rank gets, and when, may depend on its data (an expert without a token). Collectives may not. So
the first backward of a kind is *recorded*: ranks agree step by step on the chunks that are complete. From then on all
ranks reduce a chunk at the point where the slowest rank had its last gradient. A rank without a gradient by then
contributes zeros, and a gradient that arrives later is reduced at the end of the backward.

There are two kinds of points. If backward gathers parameters, points are touches: a chunk is reduced right before its
touch, or before the next later one in the trace that the pass has. A touch is named by its event (see trace.py), so
touches that a pass leaves out shift no point. If backward gathers nothing, only the order of the reductions matters:
`order` has the chunks that every rank completed, and in every backward all ranks reduce all of them in this order
before they agree on the remaining ones.
"""

from collections.abc import Collection, Mapping, Sequence

from gemini.placement.trace import Touch


class ReductionOrder:
    """The points at which one model's trainable chunks are reduced, by chunk index."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self.chunks = tuple(chunks)
        self.order = tuple(reversed(self.chunks))  # a first guess: backward reaches the last operator first
        self.points: dict[int, Touch] | None = None  # chunk -> touch before which it is reduced; None: not recorded yet
        self.last_fire = dict.fromkeys(self.chunks, -1)  # this backward: touches before the chunk's last gradient
        self._places: Mapping[Touch, int] = {}  # the trace that `_in_turn` was made from
        self._in_turn: list[tuple[int, int]] = []  # (place of the point, -chunk), sorted
        self._next = 0  # index in `_in_turn` of the first chunk that is not due yet
        self.fired: list[int] = []  # this backward: chunks in order of completion

    def begin(self, places: Mapping[Touch, int] | None) -> None:
        """Begin a backward. places: the place of each touch in the trace. None: this kind of backward has no points."""
        # A trace that has changed is another object (`NextUse.places`): only then the points are looked up again.
        if places is not None and places is not self._places:
            self._place_points(places)
        self._next = 0
        self.last_fire = dict.fromkeys(self.chunks, -1)
        self.fired = []

    def note_complete(self, chunk: int) -> None:
        """All expected gradients of the chunk have come in this backward."""
        self.fired.append(chunk)

    def note_unsynced(self, *, as_expected: bool) -> None:
        """Follow a backward under no_sync(), which reduced nothing. The next one is expected to touch the same chunks.

        If this one had unexpected touches, a chunk may get its last gradient after its point. That gradient would be
        reduced apart from the sum that no_sync() left, with other bits than a sum that each rank makes before the
        exchange. So the next backward is recorded.
        """
        if not as_expected:
            self.points = None

    def due(self, position: int) -> list[int]:
        """The chunks whose points are before `position` in the trace and that were not due earlier."""
        first = self._next
        # Points are sorted, so each is passed once in a backward, however many touches ask.
        while self._next < len(self._in_turn) and self._in_turn[self._next][0] < position:
            self._next += 1
        return [-chunk for _, chunk in self._in_turn[first : self._next]]

    def adopt(self, points: Sequence[int], ranking: Sequence[int], touches: Collection[Touch]) -> None:
        """Adopt the points and the order that the ranks agreed on.

        points: for each chunk the number of touches before its last gradient on the slowest rank, -1 for none anywhere.
        ranking: for each chunk its place in the order of completion on the slowest rank.
        touches: the touches of the pass that ends, in order. A gradient that comes after all of them has no point.

        A chunk without a gradient on any rank, such as an idle expert's, keeps its earlier point.
        """
        named = list(touches)
        pairs = zip(self.chunks, points, strict=True)
        points_by_chunk = dict(pairs)
        kept = {chunk: touch for chunk, touch in (self.points or {}).items() if points_by_chunk[chunk] < 0}
        found = {chunk: named[point] for chunk, point in points_by_chunk.items() if 0 <= point < len(named)}
        self.points = kept | found
        self._places = {}  # makes the next `begin` look up the new points
        # Chunks that some rank did not complete are left out of the order: ranks agree on them at the end.
        places = dict(zip(self.chunks, ranking, strict=True))
        complete = [chunk for chunk in self.chunks if places[chunk] < len(self.chunks)]
        # Of equal places the later chunk comes first: backward reaches it first.
        self.order = tuple(sorted(complete, key=lambda chunk: (places[chunk], -chunk)))

    def ranking(self) -> list[int]:
        """This rank's contribution to the `ranking` of `adopt`. Chunks that did not complete come last."""
        places = {chunk: place for place, chunk in enumerate(self.fired)}
        # A place beyond all others survives the maximum over ranks, so one rank without the chunk keeps it out of the
        # order.
        return [places.get(chunk, len(self.chunks)) for chunk in self.chunks]

    def _place_points(self, places: Mapping[Touch, int]) -> None:
        """Look up the points in another trace. If it lacks one of them, the next backward records all points again."""
        self._places, self._in_turn = places, []
        if self.points is not None and all(touch in places for touch in self.points.values()):
            self._in_turn = sorted((places[touch], -chunk) for chunk, touch in self.points.items())
        else:
            self.points = None
