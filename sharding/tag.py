"""The identity of a collective, 16 bytes that travel with it.

Chunks have one size, so two ranks that gather *different* chunks would exchange garbage without any error. Therefore
every collective that moves a payload carries each rank's tag, and the receiver compares the tags before the data is
used. A tag names the plan, the number of the collective in it, the chunk, and the moment of the step.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TAG_WORDS = 2
"""int64 words of a packed tag."""


class Tag(NamedTuple):
    """Four unsigned 32-bit numbers. The caller wraps a number that may grow beyond (`sequence & 0xFFFFFFFF`)."""

    plan_hash: int
    sequence: int
    chunk: int
    moment: int

    def pack(self) -> tuple[int, int]:
        """The tag as two signed 64-bit integers. Raises ValueError if a field is no unsigned 32-bit number."""
        try:
            # Signed words, because tags travel in int64 tensors. `unpack` gets the same bits back.
            first, second = struct.unpack("<qq", struct.pack("<IIII", *self))
        except struct.error:
            raise ValueError(f"every field of a tag is an unsigned 32-bit number, got {self}") from None
        return first, second

    @classmethod
    def unpack(cls, words: Sequence[int]) -> Tag:
        """The tag that `pack` turned into these two integers."""
        return cls(*struct.unpack("<IIII", struct.pack("<qq", *words)))

    def __str__(self) -> str:
        return f"chunk {self.chunk} at moment {self.moment} (collective {self.sequence} of plan {self.plan_hash:08x})"


class TagMismatch(RuntimeError):
    """Ranks entered one collective with different tags. Raised on every rank; the data must not be used."""

    def __init__(self, rank: int, expected: Tag, found: Mapping[int, Tag]) -> None:
        self.rank = rank
        self.expected = expected
        self.found = dict(found)  # every rank's tag
        lines = [f"  rank {other}: {tag}" for other, tag in self.found.items()]
        head = f"ranks disagree on a collective; rank {rank} expected {expected}"
        super().__init__("\n".join([head, *lines]))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross processes when ranks report. The default would pass the message to `__init__`.
        return type(self), (self.rank, self.expected, self.found)
