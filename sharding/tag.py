"""What a collective is for: a tag that travels with it, so that ranks notice when they mean different ones."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# -- The identity of a collective, 16 bytes that travel with it.
#
# Chunks have one size, so two ranks that gather *different* chunks would exchange garbage without any error. Therefore
# every collective that moves a payload carries each rank's tag, and the receiver compares the tags before the data is
# used. A tag names the plan, the number of the collective in it, the chunk, and the moment of the step.


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


# -- Tags in tensors: a buffer for this rank's tag, and one to receive the tags of all ranks for the comparison.


class Announced(NamedTuple):
    """One comparison: `own` is gathered into `every`, then `verify` is called."""

    rank: int
    tag: Tag
    own: Tensor  # (TAG_WORDS,) int64
    every: Tensor  # (world_size * TAG_WORDS,) int64

    def verify(self) -> None:
        """Raise `TagMismatch` unless all ranks brought the same tag."""
        words: list[int] = self.every.tolist()
        if words != list(self.tag.pack()) * (len(words) // TAG_WORDS):
            rows = (words[start : start + TAG_WORDS] for start in range(0, len(words), TAG_WORDS))
            raise TagMismatch(self.rank, self.tag, {rank: Tag.unpack(row) for rank, row in enumerate(rows)})


class TagBuffers:
    """Buffers for all comparisons that can be in flight at once, each made at its first use."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._by_use: dict[tuple[torch.device, str], tuple[Tensor, Tensor]] = {}

    def announce(self, tag: Tag, device: torch.device, use: str) -> Announced:
        """The tag in buffers on `device`. Each `use` has its own buffers, and its last comparison must be over."""
        if (device, use) not in self._by_use:
            # A buffer made inside inference mode could not be written outside it.
            with torch.inference_mode(False):
                own = torch.empty(TAG_WORDS, dtype=torch.int64, device=device)
                every = torch.empty(self._world_size * TAG_WORDS, dtype=torch.int64, device=device)
            self._by_use[device, use] = own, every
        own, every = self._by_use[device, use]
        # On a device these are two fills that the host does not wait for. A copy from ordinary host memory would wait.
        own[0], own[1] = tag.pack()
        return Announced(self._rank, tag, own, every)


# -- Envelopes: fixed-size messages in which ranks on gloo exchange a tag each, with a few bytes of data.
#
# The first message of every collective has this size, whatever the collective is, see [Note: Tags] in collectives.py.
# On gloo an exchange of these bytes takes as long as one of a tag alone, and two exchanges take twice as long.


_HEADER = struct.Struct("<qqq")  # the tag's two words, and the number of bytes of the rank's data
_NUM_BYTES = 1024
MOST_TOLD_BYTES = _NUM_BYTES - _HEADER.size
"""Bytes of data that fit into an envelope."""


class Told(NamedTuple):
    """The data of all ranks, in rank order."""

    sizes: list[int]  # bytes of each rank's data
    data: list[bytes] | None  # None if some rank's data did not fit


class Envelopes:
    """The envelopes of one group. One exchange at a time."""

    def __init__(self, group: dist.ProcessGroup, wait: Callable[[dist.Work], None]) -> None:
        self._group = group
        self._wait = wait
        self._rank = group.rank()
        # Buffers made inside inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._sent = torch.zeros(group.size(), _NUM_BYTES // 8, dtype=torch.int64, device="cpu")
            self._received = torch.zeros_like(self._sent)

    def exchange(self, tag: Tag | None, data: bytes = b"") -> Told:
        """Send the tag and `data` to every rank. At most `MOST_TOLD_BYTES` of data fit. Collective.

        With a tag, raises `TagMismatch` on every rank, before any data of the other ranks is used.
        """
        words = (0, 0) if tag is None else tag.pack()
        own = (_HEADER.pack(*words, len(data)) + data[:MOST_TOLD_BYTES]).ljust(_NUM_BYTES, b"\0")
        # Row i goes to rank i: every rank gets the same envelope.
        self._sent.copy_(torch.frombuffer(bytearray(own), dtype=torch.int64))
        received, sent = self._received.view(-1), self._sent.view(-1)
        self._wait(dist.all_to_all_single(received, sent, group=self._group, async_op=True))
        every = self._received.numpy().tobytes()
        starts = range(0, len(every), _NUM_BYTES)
        headers = [_HEADER.unpack_from(every, start) for start in starts]
        if tag is not None and {header[:2] for header in headers} != {words}:
            raise TagMismatch(self._rank, tag, {rank: Tag.unpack(header[:2]) for rank, header in enumerate(headers)})
        # If one rank's data does not fit, all ranks see that, and the caller sends all data in another exchange.
        sizes = [header[2] for header in headers]
        if max(sizes) > MOST_TOLD_BYTES:
            return Told(sizes, None)
        firsts = [start + _HEADER.size for start in starts]
        return Told(sizes, [every[first : first + size] for first, size in zip(firsts, sizes, strict=True)])
