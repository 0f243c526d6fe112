"""One size of one system, trained for a few steps in processes of its own: what it holds, at two moments.

`held`: after backward, before the step, so that all gradients are there. `at_rest`: after the step. The model is a row
of equal linear layers, so that what a system keeps of a layer or two does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measured_bytes import held_bytes

STEPS = 3
LEARNING_RATE = 1e-3


class Layers(nn.Module):
    """Linear layers with a residual around each."""

    def __init__(self, num_layers: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def build(num_layers: int, width: int, dtype: torch.dtype) -> Layers:
    torch.manual_seed(0)
    return Layers(num_layers, width, dtype)


def loss_of(model: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> Tensor:
    x = torch.linspace(-1, 1, width, dtype=dtype).unsqueeze(0)
    return (model(x) - x.flip(-1)).float().square().mean()


def num_parameters(num_layers: int, width: int) -> int:
    return num_layers * (width * width + width)


def moments(backward: Callable[[], object], step: Callable[[], object]) -> dict[str, Any]:
    """Bytes of this rank in the last of STEPS steps."""
    found: dict[str, Any] = {}
    for _ in range(STEPS):
        backward()
        _together()
        found["held"] = held_bytes()._asdict()
        step()
        _together()
        found["at_rest"] = held_bytes()._asdict()
    return found


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def ours(
    rank: int,
    world_size: int,
    num_layers: int,
    width: int,
    placement: str,
    smallest_budget: bool,
    optimizer: str = "adam",
) -> dict[str, Any]:
    """bf16 weights, stage 3, clipping on, so that gradients must be held; and the bytes that the plan counts.

    Without a budget the device keeps what it has room for: a copy of every weight, gathered. With the smallest one that
    is accepted it keeps what must be there. The budget is set; what is measured does not depend on it being kept.
    optimizer: HybridAdam with fp32 moments, with "8bit" ones, or "muon" of the matrices beside it.
    """
    from gemini import Muon, Settings, ShardedModel, ShardedOptimizer, estimate_memory
    from gemini.placement.demand import Kind, Tier
    from optim import HybridAdam

    module = build(num_layers, width, torch.bfloat16)
    settings = Settings(
        device="emulated",
        tensor_placement_policy=placement,
        chunk_size=num_parameters(2, width),  # the same at every size of the model, and with it slots and scratch
    )
    least = (
        estimate_memory(module, world_size=world_size, settings=settings).plan.minimum_bytes
        if smallest_budget
        else None
    )
    model = ShardedModel(module, settings=settings, model_data_memory=least)
    by_dim: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in model.parameters():
        by_dim[optimizer == "muon" and parameter.ndim == 2].append(parameter)
    of_rest, of_matrices = by_dim
    adam = HybridAdam(of_rest, lr=LEARNING_RATE, state_dtype="8bit" if optimizer == "8bit" else None)
    given = [Muon(of_matrices, lr=LEARNING_RATE), adam] if of_matrices else adam
    sharded = ShardedOptimizer(model, given, clip_grad_norm=1.0)

    def step() -> None:
        sharded.step()
        sharded.zero_grad()

    found = moments(lambda: sharded.backward(loss_of(model, width, torch.bfloat16)), step)
    placement_of, demand = model.plan.placement, model.plan.demand
    planned = sum(placement_of.bytes_by_kind(demand, tier)[kind] for tier in Tier for kind in Kind)
    return {**found, "planned": planned}


def fsdp2(rank: int, world_size: int, num_layers: int, width: int) -> dict[str, Any]:
    """fp32 weights on the host, bf16 in use, torch's fused AdamW: the usual recipe."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    module: Any = build(num_layers, width, torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for layer in module.layers:
        fully_shard(layer, **options)
    fully_shard(module, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return moments(lambda: loss_of(module, width, torch.float32).backward(), step)


def deepspeed(rank: int, world_size: int, num_layers: int, width: int) -> dict[str, Any]:
    """ZeRO-3, parameters and optimizer on the host, bf16 with DeepSpeedCPUAdam. Needs deepspeed's own environment."""
    import deepspeed as library

    library.init_distributed(dist_backend="gloo")
    on_host = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": on_host,
            "offload_param": on_host,
            "stage3_param_persistence_threshold": 0,
            # fixed and small: they are no part of the slope, and the default is a gigabyte
            "reduce_bucket_size": 4 * width * width,
            "stage3_prefetch_bucket_size": 4 * width * width,
            "stage3_max_live_parameters": 4 * width * width,
        },
    }
    with library.zero.Init(config_dict_or_path=config):
        module = build(num_layers, width, torch.bfloat16)
    engine, *_ = library.initialize(model=module, model_parameters=module.parameters(), config=config)
    return moments(lambda: engine.backward(loss_of(engine, width, torch.bfloat16)), engine.step)
