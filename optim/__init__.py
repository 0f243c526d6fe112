"""Elementwise optimizers on flat memory: kernels that know tensors and numbers, but no chunks and no ranks.

`reference.py` defines the arithmetic of an update and `norm.py` that of the gradient norm. `dispatch.py` runs them with
the fastest kernel of the machine, which gives the same bits. A sharded optimizer calls these functions on its shards,
with the same bits as `HybridAdam` on the whole model.
"""

from optim.adam import CPUAdam, HybridAdam, hyperparameters
from optim.average import average_, exchange_
from optim.clip import clip_coefficient, clip_grad_norm_
from optim.cpu_extension import num_threads, set_num_threads
from optim.dispatch import accumulate_sum_of_squares_, prepare, update_pieces
from optim.formats import (
    BF16,
    BF16_STOCHASTIC,
    EIGHT_BIT,
    FORMATS,
    FP32,
    StateFormat,
    StateLayout,
    StoredRun,
    format_named,
    format_of_tensor,
)
from optim.master import absorb_edits_, join_master_, round_master_, split_master_, to_bfloat16_half_up
from optim.norm import (
    NAN_LIMB,
    NUM_LIMBS,
    TILE,
    max_abs,
    norm_from_limbs,
    zero_norm_limbs,
)
from optim.piece import HALF_DTYPES, AdamPiece, AdamScalars, Spans, adam_scalars, in_memory_order, is_dense

__all__ = [
    "HybridAdam",
    "prepare",
    "CPUAdam",
    "clip_grad_norm_",
    "num_threads",
    "set_num_threads",
    # for the sharded optimizer
    "update_pieces",
    "AdamPiece",
    "Spans",
    "split_master_",
    "join_master_",
    "adam_scalars",
    "AdamScalars",
    "hyperparameters",
    "to_bfloat16_half_up",
    "round_master_",
    "average_",
    "exchange_",
    "absorb_edits_",
    "HALF_DTYPES",
    "StateFormat",
    "StateLayout",
    "StoredRun",
    "FORMATS",
    "BF16_STOCHASTIC",
    "FP32",
    "BF16",
    "EIGHT_BIT",
    "format_named",
    "format_of_tensor",
    "in_memory_order",
    "is_dense",
    "clip_coefficient",
    "accumulate_sum_of_squares_",
    "norm_from_limbs",
    "zero_norm_limbs",
    "max_abs",
    "NUM_LIMBS",
    "NAN_LIMB",
    "TILE",
]
