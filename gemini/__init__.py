"""gemini: trains models larger than the GPU they run on, with the same bits wherever the state lives.

    model = ShardedModel(module, device_memory="20GiB")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))

Reading order: placement, memory, chunks, executor, model, optimizer. See docs/architecture.md.
"""

from gemini import shadowing

shadowing.check()

from gemini.device import current_device  # noqa: E402
from gemini.dist_logger import disable_existing_loggers, get_dist_logger  # noqa: E402
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
from gemini.launch import launch_from_torch  # noqa: E402
from gemini.model.estimate import MemoryEstimate, estimate_memory  # noqa: E402
from gemini.model.external import register_external_parameter, unregister_external_parameter  # noqa: E402
from gemini.model.gathered import GatheredParameters  # noqa: E402
from gemini.model.leaf_marks import set_leaf_module, unset_leaf_module  # noqa: E402
from gemini.model.sharded_model import ShardedModel  # noqa: E402
from gemini.model.zero_init import ZeroInitContext  # noqa: E402
from gemini.optimizer.full_access import (  # noqa: E402
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from gemini.optimizer.hashing import state_hash  # noqa: E402
from gemini.optimizer.sharded_optimizer import ShardedOptimizer  # noqa: E402
from gemini.settings import Settings  # noqa: E402
from optim import clip_grad_norm_  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "DivergenceError",
    "GatheredParameters",
    "GeminiError",
    "MemoryEstimate",
    "RankLostError",
    "ReleasedParameterError",
    "RemoteRankError",
    "ShardedModel",
    "Settings",
    "ShardedOptimizer",
    "SlotError",
    "StaleGraphError",
    "UnsupportedError",
    "ZeroInitContext",
    "clip_grad_norm_",
    "current_device",
    "disable_existing_loggers",
    "estimate_memory",
    "get_dist_logger",
    "launch_from_torch",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_leaf_module",
    "state_hash",
    "unregister_external_parameter",
    "unset_leaf_module",
]
