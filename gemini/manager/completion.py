"""Agrees on which gradients are complete on every rank, while a backward is recorded.

[Note: News] Ranks ask at every touch. A message about every chunk at each touch would cost the square of the number of
chunks, so a rank sends only what has changed since the last touch. Mostly the news is equal on all ranks, which a
digest of fixed size shows. Only where digests differ do ranks send the news itself. Each rank then counts, by chunk,
how many ranks have its gradient complete.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import torch

from gemini.chunks.gradient import ChunkGradient
from gemini.manager.grad_memory import GradMemory
from gemini.ranks.communicator import Communicator

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
