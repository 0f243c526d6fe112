"""When each chunk's gradient is reduced, so that every rank does it at the same point of the backward.

Which gradients a rank gets, and when, may depend on its data (an expert without a token). Collectives may not. So
the first backward of a kind is *recorded*: ranks agree step by step on what is complete. From then on the point at
which the slowest rank had the last gradient of a chunk is the point at which all ranks reduce it; a rank that has
nothing to give by then gives zeros, and a gradient that comes later still is reduced at the end of the backward.

Two kinds of points. Where backward gathers parameters, points are touches, and a chunk is reduced right before
a certain touch. Where it does not, only the reductions' own order matters: `order` holds the chunks that every rank
completed, and every rank reduces all of them in every backward, in this order, before it asks what is left.
"""

from collections.abc import Sequence


class ReductionOrder:
    """Points of one model's trainable chunks, by chunk index."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self.chunks = tuple(chunks)
        self.order = tuple(reversed(self.chunks))  # at first: all; backward meets the last operator first
        self.at_touch: dict[int, tuple[int, ...]] | None = None  # None: not recorded yet
        self.last_fire = dict.fromkeys(self.chunks, -1)  # this backward: touches before the chunk's last gradient
        self.fired: list[int] = []  # this backward: chunks in order of completion

    def begin(self) -> None:
        """A backward starts."""
        self.last_fire = dict.fromkeys(self.chunks, -1)
        self.fired = []

    def note_unsynced(self, *, as_expected: bool) -> None:
        """A backward under no_sync() ended, which reduced nothing. The next one is expected to touch what it touched.

        If it did not touch what was expected of it, the points count touches of a pass that is over. A chunk reduced at
        one of them may still wait for its gradient, which would then be reduced apart from what no_sync() left: that
        sum has other bits than one that each rank makes before the exchange. So the next backward is recorded.
        """
        if not as_expected:
            self.at_touch = None

    def adopt(self, points: Sequence[int], ranking: Sequence[int]) -> None:
        """Take over what the ranks agreed on.

        points: the touches before each chunk's last gradient on the slowest rank, -1 for none on any rank.
        ranking: each chunk's place in the order of completion, on the slowest rank.
        """
        at_touch: dict[int, list[int]] = {}
        for chunk, point in zip(self.chunks, points, strict=True):
            if point >= 0:
                at_touch.setdefault(point, []).append(chunk)
        self.at_touch = {point: tuple(sorted(chunks, reverse=True)) for point, chunks in at_touch.items()}
        places = dict(zip(self.chunks, ranking, strict=True))
        complete = [chunk for chunk in self.chunks if places[chunk] < len(self.chunks)]
        self.order = tuple(sorted(complete, key=lambda chunk: (places[chunk], -chunk)))

    def ranking(self) -> list[int]:
        """This rank's `ranking` for `adopt`; chunks that did not complete come last."""
        places = {chunk: place for place, chunk in enumerate(self.fired)}
        return [places.get(chunk, len(self.chunks)) for chunk in self.chunks]
