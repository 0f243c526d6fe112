"""`Trainer`: a training loop over an `Engine`, with hooks.

Reading order: `batches.py` (from a batch to a loss), `together.py` (ranks begin and stop together), `trainer.py` (the
loop), `hook.py` (what a hook is told), `metrics.py`, `schedule.py` and `writers.py` (the hooks that are here).
"""

from gemini.engine.trainer.checkpoints import CheckpointHook
from gemini.engine.trainer.hooks import Accuracy, Hook, JsonLines, LearningRate, Loss, Memory, TensorBoard, Throughput
from gemini.engine.trainer.trainer import LRSchedulerHook, Trainer

__all__ = [
    "Accuracy",
    "CheckpointHook",
    "Hook",
    "JsonLines",
    "LRSchedulerHook",
    "LearningRate",
    "Loss",
    "Memory",
    "TensorBoard",
    "Throughput",
    "Trainer",
]
