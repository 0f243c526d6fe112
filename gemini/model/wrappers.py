"""What trainers ask of a model before they wrap it once more, and what they are told."""

from __future__ import annotations

import sys

from gemini.errors import UnsupportedError

DDP = (
    "DistributedDataParallel cannot wrap a ShardedModel, which reduces gradients between ranks itself: use the "
    "ShardedModel as it is, with its own no_sync()"
)
PREPARED = "_is_accelerate_prepared"
"""The attribute by which `Accelerator.prepare`, and so `transformers.Trainer`, asks a model; afterwards it sets it."""

_AUTOCAST = (
    "Accelerate's mixed_precision is not applied to a ShardedModel on several ranks: give dtype=torch.bfloat16, or "
    "another one, to ShardedModel(...), and leave mixed_precision='no' (for transformers.Trainer: bf16=False)"
)


def is_prepared(world_size: int) -> bool:
    """Whether `Accelerator.prepare` has nothing to do for a model: on several ranks it would wrap it in DDP.

    Raises UnsupportedError where it would also have put autocast around the model's forward.
    """
    if world_size == 1:
        return False
    state = sys.modules.get("accelerate.state")
    if state is not None and state.AcceleratorState._shared_state and state.AcceleratorState().mixed_precision != "no":
        raise UnsupportedError(_AUTOCAST)
    return True
