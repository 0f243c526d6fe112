"""`Trainer`: a training loop over an `Engine`, with hooks.

Reading order: `batches.py` (from a batch to a loss), `together.py` (ranks begin and stop together), `trainer.py` (the
loop), `hook.py` (what a hook is told), `metrics.py`, `schedule.py` and `writers.py` (the hooks that are here).
"""

from gemini.engine.trainer.checkpoints import CheckpointHook
from gemini.engine.trainer.hook import Hook
from gemini.engine.trainer.metrics import Accuracy, LearningRate, Loss, Memory, Throughput
from gemini.engine.trainer.schedule import LRSchedulerHook
from gemini.engine.trainer.trainer import Trainer
from gemini.engine.trainer.writers import JsonLines, TensorBoard

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
