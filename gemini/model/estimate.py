"""What training a model will take on each rank, from its shapes alone: nothing is allocated.

The same packing and the same policies as `ShardedModel`'s, so that the bytes are those that it takes, with Adam as
optimizer and one micro-batch a step. Activations are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.model.operators import find_operators
from gemini.model.plan import Plan, Planner
from gemini.model.precision import Precision, Weights
from gemini.placement.demand import Kind, Tier
from gemini.placement.policy import PlacementPolicy, resolve_policy
from gemini.placement.sizes import parse_bytes
from sharding import ShardStrategy, resolve_strategy

_SLOT_KINDS = ("slots", "gradient slots", "scratch")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of model data on one rank, by kind as in `memory_report()`; `num_parameters` counts tied ones once."""

    num_parameters: int
    device: dict[str, int]
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients, masters and optimizer state at rest, wherever: slots and receive buffers are not."""
        both = (self.device, self.host)
        return sum(num_bytes for tier in both for kind, num_bytes in tier.items() if kind not in _SLOT_KINDS)


def estimate_memory(
    model: Any,
    *,
    world_size: int = 1,
    stage: int = 3,
    dtype: Weights = None,
    reduce_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    reuse_fp16_shard: bool = False,
    shard_strategy: type[ShardStrategy] | ShardStrategy | None = None,
    chunk_size: int | None = None,
    tensor_placement_policy: str | PlacementPolicy = "auto",
    model_data_memory: int | str | None = None,
) -> MemoryEstimate:
    """The bytes that every rank of `ShardedModel(model, ...)` with these arguments will hold.

    With `reuse_fp16_shard` no gradient has memory of its own, as in steps of one micro-batch.

    model: a module on any device, "meta" included, or the config of a Hugging Face model.
    Raises BudgetError if it does not fit into `model_data_memory`. Not collective.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, found {world_size!r}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, found {stage!r}")
    precision = Precision(dtype, reduce_dtype, accumulate_dtype, reuse_fp16_shard)
    module = _module_of(model)
    operators = find_operators(module, gathers=stage == 3 and world_size > 1)
    planner = Planner(
        module,
        operators,
        precision,
        precision.of_weights(module),
        resolve_strategy(shard_strategy),
        resolve_policy(tensor_placement_policy),
        stage=stage,
        rank=0,
        world_size=world_size,
        device=torch.device("meta"),
    )
    _, plan = planner.plan(chunk_size, parse_bytes(model_data_memory, "model_data_memory"), None)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    return MemoryEstimate(num_parameters, _on(Tier.DEVICE, plan), _on(Tier.HOST, plan))


def _on(tier: Tier, plan: Plan) -> dict[str, int]:
    demand, placement = plan.demand, plan.placement
    found: dict[str, int] = {str(kind): 0 for kind in Kind}
    for chunk, homes in zip(demand.chunks, placement.homes, strict=True):
        for kind, num_bytes in chunk.home_bytes.items():
            if homes[kind] is tier:
                found[kind] += num_bytes
    if tier is Tier.DEVICE:
        kept = (demand.chunks[index] for index in sorted(placement.kept))
        around = sum(chunk.payload_bytes - chunk.home_bytes[Kind.PARAM] for chunk in kept)
        pairs = (
            ("slots", placement.num_slots, demand.slot_bytes),
            ("gradient slots", placement.num_gradient_slots, demand.gradient_slot_bytes),
        )
        for name, counts, sizes in pairs:
            found[name] = sum(count * size for count, size in zip(counts, sizes, strict=True))
        found["slots"] += around
        found["scratch"] = demand.scratch_bytes
    return found


def _module_of(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if not hasattr(model, "model_type"):
        raise TypeError(f"model must be a torch module or a Hugging Face config, found {type(model).__name__}")
    import transformers

    classes = [getattr(transformers, name, None) for name in getattr(model, "architectures", None) or ()]
    with torch.device("meta"):
        if classes and classes[0] is not None:
            built: nn.Module = classes[0](model)
        else:
            built = transformers.AutoModelForCausalLM.from_config(model)
    return built
