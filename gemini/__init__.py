"""gemini: trains models larger than the GPU they run on, with the same bits wherever the state lives.

    model = ShardedModel(module, device_memory="20GiB")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))

Reading order: placement, memory, chunks, executor, model, optimizer. See docs/architecture.md.
"""

from gemini import shadowing

shadowing.check()

from gemini.device import current_device  # noqa: E402
from gemini.errors import (  # noqa: E402
    BudgetError,
    DivergenceError,
    GeminiError,
    RankLostError,
    ReleasedParameterError,
    RemoteRankError,
    SlotError,
    StaleGraphError,
    UnsupportedError,
)
from gemini.model.estimate import MemoryEstimate, estimate_memory  # noqa: E402
from gemini.model.operators import set_leaf_module  # noqa: E402
from gemini.model.sharded_model import ShardedModel  # noqa: E402
from gemini.optimizer.hashing import state_hash  # noqa: E402
from gemini.optimizer.sharded_optimizer import ShardedOptimizer  # noqa: E402
from optim import clip_grad_norm_  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "DivergenceError",
    "GeminiError",
    "MemoryEstimate",
    "RankLostError",
    "ReleasedParameterError",
    "RemoteRankError",
    "ShardedModel",
    "ShardedOptimizer",
    "SlotError",
    "StaleGraphError",
    "UnsupportedError",
    "clip_grad_norm_",
    "current_device",
    "estimate_memory",
    "set_leaf_module",
    "state_hash",
]
