"""`deepspeed.ops.adam`: the optimizers of `optim` under DeepSpeed's names."""

from typing import Any

from gemini.elsewhere import missing
from optim import CPUAdam as DeepSpeedCPUAdam
from optim import HybridAdam as FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


def __getattr__(name: str) -> Any:
    """Raises AttributeError, which says what to use in place of a name of DeepSpeed's."""
    raise missing(__name__, name)
