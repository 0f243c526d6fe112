"""The chunks of a model under construction: one per operator, dtype and device, each with a home and no other state."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch

from gemini.building.binding import BuildBinding, alive
from gemini.building.link import BuiltLink, built_link_of
from gemini.chunks.chunk import Chunk
from gemini.chunks.placeholder import placeholder
from gemini.memory.memory import Memory
from gemini.memory.modes import untracked
from gemini.placement.demand import Kind, Tier
from optim import round_master_
from sharding import ShardLayout


class BuiltChunks:
    """The chunks of one context on this rank. A chunk lives as long as one of its parameters.

    home_of: maps a number of bytes to the tier where a shard of that size rests.
    """

    def __init__(self, memory: Memory, home_of: Callable[[int], Tier], binding: BuildBinding) -> None:
        self.placeholder = functools.cache(placeholder)
        self._memory = memory
        self._home_of = home_of
        self._binding = binding
        self._chunks: weakref.WeakSet[Chunk] = weakref.WeakSet()
        self._num_chunks = 0

    def make(self, dtype: torch.dtype, layout: ShardLayout) -> Chunk:
        """A chunk with a home for its shard. Nothing is trained yet, so it has no other state."""
        chunk = Chunk(
            index=self._num_chunks,
            dtype=dtype,
            trainable=False,
            layout=layout,
            oversize=False,
            rank=self._binding.communicator.rank,
            home_layout=layout,
            optim_layout=layout,
            travel_dtype=dtype,
            gradient_dtype=dtype,
            sum_dtype=dtype,
        )
        num_bytes = layout.shard_numel * dtype.itemsize
        tier = self._home_of(num_bytes)
        chunk.allocate_home(Kind.PARAM, tier, self._memory, num_bytes)
        ledger = self._memory.tier(tier).ledger
        # A chunk ends with the last of its parameters, which the user may drop at any time: then its home is uncounted.
        weakref.finalize(chunk, ledger.count_freed, Kind.PARAM, num_bytes).atexit = False
        self._num_chunks += 1
        self._chunks.add(chunk)
        return chunk

    def cast(self, dtype: torch.dtype) -> None:
        """Round every fp32, fp16 and bf16 weight to `dtype`, shard by shard. Local; nothing is fetched."""
        kinds = (torch.float32, torch.float16, torch.bfloat16)
        with untracked():
            waiting = [c for c in self.in_order() if c.dtype in kinds and c.dtype is not dtype][::-1]
            # Taken out of the list one by one: in it, all old shards would stay beside all rounded ones.
            while waiting:
                self._round(waiting.pop(), dtype)

    def _round(self, chunk: Chunk, dtype: torch.dtype) -> None:
        """Move the chunk's parameters into a new chunk of another dtype, with rounded values."""
        # The layout counts elements, so it serves for another dtype as well.
        rounded = self.make(dtype, chunk.layout)
        round_master_(rounded.homes[Kind.PARAM].flat, chunk.homes[Kind.PARAM].flat.float())
        for link in _links_of(chunk):
            managed = link.managed
            shown = self.placeholder(dtype, managed.placeholder.device, managed.shape)
            link.follow(
                rounded.manage(managed.parameter, managed.name, managed.index, managed.offset, managed.operator, shown)
            )
            self._binding.show_placeholder(link.managed)
        chunk.drop_parameters(list(chunk.parameters))
        self._binding.note_left(rounded)

    def in_order(self) -> list[Chunk]:
        """The chunks of which a parameter still exists, in order of construction."""
        # A WeakSet has no order, and all ranks must go through their chunks in the same one.
        return sorted(self._chunks, key=lambda chunk: chunk.index)

    def links(self) -> list[BuiltLink]:
        """The links of all parameters that still exist on this rank, in order of construction."""
        return [link for chunk in self.in_order() for link in _links_of(chunk)]


def _links_of(chunk: Chunk) -> list[BuiltLink]:
    links = (built_link_of(parameter) for _, parameter in alive(chunk))
    return [link for link in links if link is not None]
