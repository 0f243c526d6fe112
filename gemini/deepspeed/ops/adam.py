"""`deepspeed.ops.adam`: the optimizers of `optim` under DeepSpeed's names."""

from gemini.elsewhere import refusing
from optim import CPUAdam as DeepSpeedCPUAdam
from optim import HybridAdam as FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

__getattr__ = refusing(__name__)
