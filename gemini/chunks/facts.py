"""Facts about a chunk on one rank, which are fixed when the chunk is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from sharding import ShardLayout


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
    widens: Final[bool] = False  # the reduced gradient becomes fp32 when a second micro-batch is added
    narrows: Final[bool] = False  # the reduced gradient is rounded to `gradient_dtype` before it is stored
    splits_master: Final[bool] = False  # bf16: the fp32 master is the parameter home and the int16 remainders beside it
    lends_home: Final[bool] = False  # the parameter home may hold the reduced gradient between backward and step
    is_fine: Final[bool] = False  # many small parameters: Python's cost for each outweighs moving the bytes
    is_chosen: Final[bool] = False  # routing chooses which of its parameters are used, on each rank from its data
