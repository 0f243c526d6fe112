"""The weights from before a write, for split masters: they show which elements were edited (see `masters.py`).

They are kept from the moment when a write is possible until the step, in host memory that the ledger counts. If the
payload is not the home, the home itself still has them.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.errors import BudgetError
from gemini.manager.masters import weights_of
from gemini.memory.modes import unwrapped
from gemini.memory.tier import MemoryTier
from gemini.placement.demand import Kind

KIND = "weights before edits"


class Snapshots:
    """The snapshots of one model's parameters."""

    def __init__(self, host: MemoryTier) -> None:
        self._host = host
        # chunk -> position -> the weights that this rank updates, on the host; None if the home still has them
        self._kept: dict[int, dict[int, Tensor | None]] = {}

    def announce(self, managed: ManagedParameter) -> None:
        """The payload may be written to from now on. Without room for a copy, all elements will count as edited."""
        chunk = managed.chunk
        if not has_split_master(chunk):
            return
        position, kept = managed.position, self._kept.setdefault(chunk.index, {})
        # A second snapshot would be taken after the first write.
        if position in kept:
            return
        if not _payload_is_home(chunk):
            kept[position] = None
            return
        weights = _own_weights(managed)
        # An edit must not fail for lack of host memory: it only costs the parameter its remainders.
        with suppress(BudgetError):
            kept[position] = self._host.allocate(weights.nbytes, KIND).view(chunk.dtype).copy_(weights)

    def read(self, managed: ManagedParameter) -> list[Tensor] | None:
        """The old weights of each piece that this rank updates; None if the write was not announced."""
        kept = self._kept.get(managed.chunk.index, {})
        if managed.position not in kept:
            return None
        weights = kept[managed.position]
        weights = _own_weights(managed) if weights is None else weights
        return list(weights.split([piece.numel for piece in managed.pieces]))

    def refresh(self, managed: ManagedParameter) -> None:
        """Take the home's new weights: views of the payload may be written to again."""
        weights = self._kept.get(managed.chunk.index, {}).get(managed.position)
        # None stands for the home, which is up to date by itself.
        if weights is not None:
            weights.copy_(_own_weights(managed))

    def drop(self, chunk: Chunk) -> None:
        """Drop the chunk's snapshots: writes through views of its payload do not count any more."""
        for weights in self._kept.pop(chunk.index, {}).values():
            if weights is not None:
                self._host.free(weights, KIND)

    def drop_all(self, chunks: list[Chunk]) -> None:
        """Drop the snapshots of all `chunks`."""
        for chunk in chunks:
            self.drop(chunk)


def _own_weights(managed: ManagedParameter) -> Tensor:
    """A copy of the parameter's elements that this rank updates, from the home, its pieces joined."""
    chunk = managed.chunk
    pieces = (weights_of(chunk, piece.shard_start, piece.numel) for piece in managed.pieces)
    # The empty first part gives dtype and device if this rank has no piece.
    return torch.cat([weights_of(chunk, 0, 0), *pieces])


def has_split_master(chunk: Chunk) -> bool:
    """Whether the chunk is trained and its parameters are the upper halves of their masters."""
    return chunk.splits_master and Kind.MASTER in chunk.homes


def _payload_is_home(chunk: Chunk) -> bool:
    """Whether the payload is the home, or the home is a part of it."""
    return chunk.payload is not None and shares_memory(chunk.homes[Kind.PARAM].flat, chunk.payload)


def shares_memory(tensor: Tensor, payload: Tensor) -> bool:
    """Whether `tensor` is a view of `payload`'s storage. Empty storages have no address and share nothing."""
    tensor = unwrapped(tensor)
    if tensor.layout != torch.strided or tensor.device != payload.device:
        return False
    address = payload.untyped_storage().data_ptr()
    return address != 0 and tensor.untyped_storage().data_ptr() == address
