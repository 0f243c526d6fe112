"""gemini: trains models larger than the GPU they run on, with the same bits wherever the state lives.

    model = ShardedModel(module, device_memory="20GiB")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))

README.md names the files to read first, and docs/architecture.md is the map of all of them.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.elsewhere import missing_in_gemini

# The sister packages have short names, and a user's own `optim.py` or `sharding/` beside a script would win. Without
# this check the first missing attribute would be reported, somewhere deep in gemini.
for _name in ("optim", "sharding"):
    _spec = find_spec(_name)  # runs no code of what it finds
    _origin = None if _spec is None else _spec.origin
    # A user's package of this name has an `__init__.py`, too, but hardly a `py.typed` beside it.
    if _origin is None or not (Path(_origin).parent / "py.typed").is_file() or Path(_origin).name != "__init__.py":
        raise ImportError(
            f"gemini needs its own package {_name!r}, but Python finds {_origin or 'nothing'}: rename that file or "
            "folder, or remove its folder from sys.path"
        )

if TYPE_CHECKING:
    from gemini.access.full_access import (
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
    from gemini.access.link import register_external_parameter, unregister_external_parameter
    from gemini.building.zero_init import ZeroInitContext
    from gemini.checkpoint.directory import Keep
    from gemini.checkpoint.loading import LoadedCheckpoint, load_checkpoint
    from gemini.checkpoint.saving import PendingCheckpoint, save_checkpoint
    from gemini.engine.engine import Engine
    from gemini.engine.initialize import initialize
    from gemini.engine.trainer.trainer import Trainer
    from gemini.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        DivergenceError,
        GeminiError,
        RankLostError,
        ReleasedParameterError,
        RemoteRankError,
        SlotError,
        StaleGraphError,
        UnsupportedError,
        UpdatedInBackwardError,
    )
    from gemini.launch import current_device, launch_from_slurm, launch_from_torch
    from gemini.log import disable_existing_loggers, get_dist_logger
    from gemini.model.estimate import MemoryEstimate, estimate_memory
    from gemini.model.operators import set_leaf_module, specs_of, unset_leaf_module
    from gemini.model.plain import GatheredParameters
    from gemini.model.sharded_model import ShardedModel
    from gemini.model.tiled import TiledLinear
    from gemini.monitor.device import EmulatedDevice, PositionPeaks
    from gemini.monitor.live import MemoryMonitor
    from gemini.monitor.readings import DeviceReading, DiskReading, HostReading, MemoryReading
    from gemini.observe import Move, Observer
    from gemini.optimizer.averages import Ema
    from gemini.optimizer.sharded_optimizer import ShardedOptimizer
    from gemini.optimizer.state_dict import state_hash
    from gemini.optimizer.whole_tensor import per_tensor
    from gemini.placement.budget import FreeBytes
    from gemini.placement.demand import ChunkDemand, Demand, Kind, Placement, Tier
    from gemini.placement.plan import Plan
    from gemini.placement.policies import StaticPolicy
    from gemini.placement.policy import PlacementPolicy, check_fits, slots_for, spend_rest
    from gemini.placement.search import plan_model
    from gemini.runtime.manager import ChunkManager
    from gemini.settings import Settings
    from gemini.tracing.trace import trace
    from optim import CPUAdam, HybridAdam, clip_grad_norm_
    from sharding import (
        BucketTensorShardStrategy,
        ChunkShardStrategy,
        ParameterSpec,
        ShardStrategy,
        TensorShardStrategy,
    )

__version__ = "0.1.0"  # the only place: pyproject.toml reads it here

__all__ = [
    "BucketTensorShardStrategy",
    "BudgetError",
    "CPUAdam",
    "CheckpointError",
    "ChunkDemand",
    "ChunkManager",
    "ChunkShardStrategy",
    "ConfigError",
    "Demand",
    "DeviceReading",
    "DiskReading",
    "DivergenceError",
    "Ema",
    "EmulatedDevice",
    "Engine",
    "FreeBytes",
    "GatheredParameters",
    "GeminiError",
    "HostReading",
    "HybridAdam",
    "Keep",
    "Kind",
    "LoadedCheckpoint",
    "MemoryEstimate",
    "MemoryMonitor",
    "MemoryReading",
    "Move",
    "Observer",
    "ParameterSpec",
    "PendingCheckpoint",
    "Placement",
    "PlacementPolicy",
    "Plan",
    "PositionPeaks",
    "RankLostError",
    "ReleasedParameterError",
    "RemoteRankError",
    "Settings",
    "ShardStrategy",
    "ShardedModel",
    "ShardedOptimizer",
    "SlotError",
    "StaleGraphError",
    "StaticPolicy",
    "TensorShardStrategy",
    "Tier",
    "TiledLinear",
    "Trainer",
    "UnsupportedError",
    "UpdatedInBackwardError",
    "ZeroInitContext",
    "check_fits",
    "clip_grad_norm_",
    "current_device",
    "disable_existing_loggers",
    "estimate_memory",
    "get_dist_logger",
    "initialize",
    "launch_from_slurm",
    "launch_from_torch",
    "load_checkpoint",
    "per_tensor",
    "plan_model",
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
    "save_checkpoint",
    "set_leaf_module",
    "slots_for",
    "specs_of",
    "spend_rest",
    "state_hash",
    "trace",
    "unregister_external_parameter",
    "unset_leaf_module",
]


# Where each name is, for `__getattr__`: it is imported when it is asked for. `gemini --help` then takes no second for
# torch, and a loop none for the engine. tests/test_public_names.py compares it with the imports above.
_HOMES = {
    "gemini.access.full_access": (
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
    ),
    "gemini.access.link": (
        "register_external_parameter",
        "unregister_external_parameter",
    ),
    "gemini.building.zero_init": ("ZeroInitContext",),
    "gemini.checkpoint.directory": ("Keep",),
    "gemini.checkpoint.loading": (
        "LoadedCheckpoint",
        "load_checkpoint",
    ),
    "gemini.checkpoint.saving": (
        "PendingCheckpoint",
        "save_checkpoint",
    ),
    "gemini.launch": ("current_device", "launch_from_slurm", "launch_from_torch"),
    "gemini.log": (
        "disable_existing_loggers",
        "get_dist_logger",
    ),
    "gemini.engine.engine": ("Engine",),
    "gemini.engine.initialize": ("initialize",),
    "gemini.engine.trainer.trainer": ("Trainer",),
    "gemini.errors": (
        "BudgetError",
        "CheckpointError",
        "ConfigError",
        "DivergenceError",
        "GeminiError",
        "RankLostError",
        "ReleasedParameterError",
        "RemoteRankError",
        "SlotError",
        "StaleGraphError",
        "UnsupportedError",
        "UpdatedInBackwardError",
    ),
    "gemini.model.estimate": (
        "MemoryEstimate",
        "estimate_memory",
    ),
    "gemini.model.operators": (
        "set_leaf_module",
        "specs_of",
        "unset_leaf_module",
    ),
    "gemini.model.plain": ("GatheredParameters",),
    "gemini.model.sharded_model": ("ShardedModel",),
    "gemini.model.tiled": ("TiledLinear",),
    "gemini.monitor.device": (
        "EmulatedDevice",
        "PositionPeaks",
    ),
    "gemini.monitor.live": ("MemoryMonitor",),
    "gemini.monitor.readings": (
        "DeviceReading",
        "DiskReading",
        "HostReading",
        "MemoryReading",
    ),
    "gemini.observe": (
        "Move",
        "Observer",
    ),
    "gemini.optimizer.averages": ("Ema",),
    "gemini.optimizer.sharded_optimizer": ("ShardedOptimizer",),
    "gemini.optimizer.state_dict": ("state_hash",),
    "gemini.optimizer.whole_tensor": ("per_tensor",),
    "gemini.placement.budget": ("FreeBytes",),
    "gemini.placement.demand": (
        "ChunkDemand",
        "Demand",
        "Kind",
        "Placement",
        "Tier",
    ),
    "gemini.placement.plan": ("Plan",),
    "gemini.placement.policies": ("StaticPolicy",),
    "gemini.placement.policy": (
        "PlacementPolicy",
        "check_fits",
        "slots_for",
        "spend_rest",
    ),
    "gemini.placement.search": ("plan_model",),
    "gemini.runtime.manager": ("ChunkManager",),
    "gemini.settings": ("Settings",),
    "gemini.tracing.trace": ("trace",),
    "optim": (
        "CPUAdam",
        "HybridAdam",
        "clip_grad_norm_",
    ),
    "sharding": (
        "BucketTensorShardStrategy",
        "ChunkShardStrategy",
        "ParameterSpec",
        "ShardStrategy",
        "TensorShardStrategy",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(module), name)
            return found
    raise missing_in_gemini(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
