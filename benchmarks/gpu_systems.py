"""The systems that are compared on the GPU: how each trains the Llama-like model, and what each holds.

bf16 arithmetic in the matrix products everywhere, and fp32 weights or masters, fp32 moments and AdamW everywhere: 16
bytes a parameter, only lying in different places. Gradients are clipped to norm 1 everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from benchmarks.llama import Size, build

LEARNING_RATE = 1e-4
MAX_NORM = 1.0


@dataclass
class Training:
    """A model that is ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], Any] | None = None
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    closing: list[Callable[[], Any]] = field(default_factory=list)

    def forward_backward(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """The mean loss of the micro-batches, detached; the gradients of it are where the system keeps them."""
        losses = []
        for tokens in micro_batches:
            with self.precision():
                loss: Tensor = self.model(tokens)
            torch.autograd.backward(loss / len(micro_batches))
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def step(self) -> None:
        if self.clip is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        for close in self.closing:
            close()


@dataclass(frozen=True)
class System:
    """One way to train; `holds` says where what lies, in bytes a parameter."""

    holds: str
    make: Callable[[Size, torch.device, dict[str, Any]], Training]


def _plain_autocast(size: Size, device: torch.device, options: dict[str, Any]) -> Training:
    model = build(size, torch.float32, device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    clip = partial(torch.nn.utils.clip_grad_norm_, parameters, MAX_NORM)
    return Training(model, optimizer, clip, partial(torch.autocast, device.type, torch.bfloat16))


def _plain_hybrid(size: Size, device: torch.device, options: dict[str, Any]) -> Training:
    import gemini
    from optim import HybridAdam

    model = build(size, torch.bfloat16, device)
    parameters = list(model.parameters())
    clip = partial(gemini.clip_grad_norm_, parameters, MAX_NORM)
    return Training(model, HybridAdam(parameters, lr=LEARNING_RATE), clip)


def _ours(size: Size, device: torch.device, options: dict[str, Any]) -> Training:
    """`options` go to ShardedModel, but for two: `bytes_per_parameter` is turned into model_data_memory, and
    `clip_grad_norm` goes to the optimizer (null: no clipping)."""
    from gemini import ShardedModel, ShardedOptimizer
    from optim import HybridAdam

    module = build(size, torch.bfloat16, device)
    where = dict(options)
    per_parameter = where.pop("bytes_per_parameter", None)
    clip = where.pop("clip_grad_norm", MAX_NORM)
    if per_parameter is not None:
        where["model_data_memory"] = int(per_parameter * sum(p.numel() for p in module.parameters()))
    model = ShardedModel(module, device="emulated" if device.type == "cpu" else device, dtype=torch.bfloat16, **where)
    adam = HybridAdam(model.parameters(), lr=LEARNING_RATE)
    return Training(model, ShardedOptimizer(model, adam, clip_grad_norm=clip), closing=[model.close])


def _fsdp2(size: Size, device: torch.device, options: dict[str, Any]) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    model = build(size, torch.float32, device)
    policies: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if options.get("offload"):
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for block in model.blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    clip = partial(torch.nn.utils.clip_grad_norm_, parameters, MAX_NORM)
    return Training(model, optimizer, clip, closing=[dist.barrier, dist.destroy_process_group])


SYSTEMS = {
    "plain autocast": System(
        "GPU: fp32 weights 4, fp32 gradients 4, fp32 moments 8; bf16 casts of the weights (2) while a step runs",
        _plain_autocast,
    ),
    "plain HybridAdam": System("GPU: bf16 weights 2, bf16 gradients 2, fp32 masters 4, fp32 moments 8", _plain_hybrid),
    "FSDP2": System(
        "GPU: fp32 shards 4, fp32 gradients 4, fp32 moments 8; bf16 weights and gradients of the blocks in use",
        _fsdp2,
    ),
    "FSDP2 + CPUOffloadPolicy": System(
        "host: fp32 shards 4, fp32 gradients 4, fp32 moments 8, AdamW on the CPU; GPU: the blocks in use", _fsdp2
    ),
    "ours": System(
        "bf16 weights 2, bf16 gradients 2, fp32 masters 4, fp32 moments 8, on the GPU as far as the budget goes (and "
        "slots), the rest on the host",
        _ours,
    ),
}
