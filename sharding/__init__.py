"""How tensors are divided over ranks.

A strategy groups parameters into units, and a layout says which part of each unit a rank holds. The collectives turn
shards into payloads and payloads into shards, and a tag identifies the payload of a collective. Nothing here knows
chunks, tiers or optimizers. Reading order: strategy, layout, tag, tag_buffers, rank_order_sum, backend, collectives.
"""

from sharding.collectives import SUM_TILE_NUMEL, Collectives, Scratch, exchange_numels, replica_numels, sum_dtype
from sharding.gloo import InFlight, backends, check_backend
from sharding.layout import ALIGNMENT, Piece, ShardLayout, Unit, WireFormat, lay_out_unit, pieces_within, round_up
from sharding.strategy import (
    BucketTensorShardStrategy,
    ChunkShardStrategy,
    ParameterSpec,
    ShardStrategy,
    TensorShardStrategy,
    check_units,
    resolve_strategy,
)
from sharding.tag import TAG_WORDS, Tag, TagMismatch
from sharding.wire import as_received, shown

__all__ = [
    # public: what a user chooses or subclasses
    "ShardStrategy",
    "TensorShardStrategy",
    "BucketTensorShardStrategy",
    "ChunkShardStrategy",
    "ParameterSpec",
    # for gemini
    "ALIGNMENT",
    "Collectives",
    "InFlight",
    "Piece",
    "SUM_TILE_NUMEL",
    "Scratch",
    "ShardLayout",
    "TAG_WORDS",
    "Tag",
    "TagMismatch",
    "Unit",
    "WireFormat",
    "as_received",
    "backends",
    "check_backend",
    "check_units",
    "exchange_numels",
    "lay_out_unit",
    "pieces_within",
    "replica_numels",
    "resolve_strategy",
    "round_up",
    "shown",
    "sum_dtype",
]
