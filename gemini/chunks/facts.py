"""Facts about a chunk on one rank, which are fixed when the chunk is made, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from sharding import Piece, ShardLayout


@dataclass(eq=False, kw_only=True)
class LocalFacts:
    """Facts about a chunk on this rank that never change. `Final` makes mypy refuse an assignment."""

    index: Final[int]
    dtype: Final[torch.dtype]
    layout: Final[ShardLayout]
    oversize: Final[bool]
    rank: Final[int]
    home_layout: Final[ShardLayout]  # of the parameter home: `layout`, or one rank's if every rank holds it whole
    optim_layout: Final[ShardLayout]  # likewise, of the reduced gradient, master and optimizer state
    travel_dtype: Final[torch.dtype]  # of gradients between ranks
    gradient_dtype: Final[torch.dtype]  # of the reduced gradient at rest
    sum_dtype: Final[torch.dtype]  # of sums of several unreduced gradients between ranks
    exchange_bytes: Final[int] = 0  # of scratch, with which ranks exchange its gradient at once
    widens: Final[bool] = False  # the reduced gradient becomes fp32 when a second micro-batch is added
    narrows: Final[bool] = False  # the reduced gradient is rounded to `gradient_dtype` before it is stored
    splits_master: Final[bool] = False  # bf16: the fp32 master is the parameter home and the int16 remainders beside it
    may_lend_home: Final[bool] = False  # the parameter home may hold the reduced gradient between backward and step
    is_fine: Final[bool] = False  # many small parameters: Python's cost for each outweighs moving the bytes
    is_chosen: Final[bool] = False  # routing chooses which of its parameters are used, on each rank from its data

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def payload_bytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    @property
    def optim_numel(self) -> int:
        """Number of elements that this rank updates."""
        return self.optim_layout.shard_numel

    @property
    def is_stepped_whole(self) -> bool:
        """Every rank updates the whole chunk, and holds its whole reduced gradient, master and optimizer state."""
        return self.optim_layout.world_size == 1

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the MASTER home: fp32 for whole masters, int16 for the remainders of split ones."""
        return torch.int16 if self.splits_master else torch.float32

    def home_slices(self) -> list[Piece]:
        """The elements that this rank updates, in its parameter home: `payload_start` is an offset in the home."""
        if self.home_layout.world_size == self.optim_layout.world_size:
            return [Piece(0, 0, self.optim_numel)]
        return list(self.layout.slices(self.rank))  # whole weights, sharded optimizer state
