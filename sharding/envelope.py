"""What ranks tell each other on gloo in one exchange of one size: a tag each, with a few bytes of data.

Whatever way a rank takes, what it sends first has this size, see [Note: Tags] in collectives.py. An exchange on gloo
takes as long for these bytes as for a tag alone, and two of them take twice as long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from .tag import Tag, TagMismatch

_HEADER = struct.Struct("<qqq")  # the tag's two words, and the number of bytes that the rank has to tell
_NUM_BYTES = 1024
MOST_TOLD_BYTES = _NUM_BYTES - _HEADER.size
"""Data that an envelope has room for."""


class Told(NamedTuple):
    """What came from all ranks, in rank order."""

    sizes: list[int]  # bytes that each rank has to tell
    data: list[bytes] | None  # None if any of it did not fit


class Envelopes:
    """Of one group. One exchange at a time."""

    def __init__(self, group: dist.ProcessGroup, wait: Callable[[dist.Work], None]) -> None:
        self._group = group
        self._wait = wait
        self._rank = group.rank()
        # buffers made inside inference mode could not be written outside it
        with torch.inference_mode(False):
            self._sent = torch.zeros(group.size(), _NUM_BYTES // 8, dtype=torch.int64, device="cpu")
            self._received = torch.zeros_like(self._sent)

    def exchange(self, tag: Tag | None, data: bytes = b"") -> Told:
        """Tell every rank the tag and `data`, of which `MOST_TOLD_BYTES` fit. Collective.

        With a tag, raises `TagMismatch` on every rank, before anything is believed of what others tell.
        """
        words = (0, 0) if tag is None else tag.pack()
        own = (_HEADER.pack(*words, len(data)) + data[:MOST_TOLD_BYTES]).ljust(_NUM_BYTES, b"\0")
        self._sent.copy_(torch.frombuffer(bytearray(own), dtype=torch.int64))
        received, sent = self._received.view(-1), self._sent.view(-1)
        self._wait(dist.all_to_all_single(received, sent, group=self._group, async_op=True))
        every = self._received.numpy().tobytes()
        starts = range(0, len(every), _NUM_BYTES)
        headers = [_HEADER.unpack_from(every, start) for start in starts]
        if tag is not None and any(header[:2] != words for header in headers):
            raise TagMismatch(self._rank, tag, {rank: Tag.unpack(header[:2]) for rank, header in enumerate(headers)})
        sizes = [header[2] for header in headers]
        if max(sizes) > MOST_TOLD_BYTES:
            return Told(sizes, None)
        firsts = (start + _HEADER.size for start in starts)
        return Told(sizes, [every[first : first + size] for first, size in zip(firsts, sizes, strict=True)])
