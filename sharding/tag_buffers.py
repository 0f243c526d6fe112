"""Tags in tensors: a buffer for this rank's tag, and one to receive the tags of all ranks for the comparison."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .tag import TAG_WORDS, Tag, TagMismatch


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
