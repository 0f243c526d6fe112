"""`Trainer`: a training loop over an `Engine`, with hooks.

Reading order: `trainer.py` (the loop), `hooks.py` (from a batch to a loss, and what a hook is told), `checkpoints.py`
(ranks begin and stop together, and save).
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
