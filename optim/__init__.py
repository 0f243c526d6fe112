"""Elementwise optimizers on flat memory: kernels that know tensors and numbers, but no chunks and no ranks.

`reference.py` defines the arithmetic of an update and `norm.py` that of the gradient norm. `dispatch.py` runs them with
the fastest kernel of the machine, which gives the same bits. A sharded optimizer calls these functions on its shards,
with the same bits as `HybridAdam` on the whole model.
"""

from optim.adam import CPUAdam, HybridAdam
from optim.clip import clip_coefficient, clip_grad_norm_
from optim.cpu_extension import num_threads, set_num_threads
from optim.dispatch import accumulate_sum_of_squares_, prepare, update_pieces
from optim.hyperparameters import hyperparameters
from optim.master import absorb_edits_, round_master_
from optim.memory_order import in_memory_order, is_dense
from optim.norm import (
    NAN_LIMB,
    NUM_LIMBS,
    TILE,
    max_abs,
    norm_from_limbs,
    zero_norm_limbs,
)
from optim.piece import HALF_DTYPES, AdamPiece
from optim.rounding import to_bfloat16_half_up
from optim.scalars import AdamScalars, adam_scalars
from optim.spans import Spans
from optim.split import join_master_, split_master_

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
    "absorb_edits_",
    "HALF_DTYPES",
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
