"""One size of a model, trained in a process of its own: what the system says that the process holds, moment by moment.

As a user has it: malloc with its own settings, and nobody returns free memory to the system.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measured_bytes import held_bytes, resident_bytes

STEPS = 3
TOKENS = 8  # few, so that activations, which malloc keeps too, do not grow with the model


class Blocks(nn.Module):
    """A transformer without embeddings: parameters of many sizes, from 1 KiB on."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def num_parameters(num_blocks: int, width: int) -> int:
    """Of `Blocks`: four square matrices, two of four times the size, biases, and two norms a block."""
    return num_blocks * (12 * width * width + 13 * width)


def train(rank: int, world_size: int, num_blocks: int, width: int, built_on_shards: bool) -> dict[str, int]:
    """Resident bytes by moment: bf16, everything on the host, the device's budget the same at every size."""
    from gemini import ShardedModel, ShardedOptimizer, ZeroInitContext
    from optim import HybridAdam

    torch.manual_seed(0)
    with ZeroInitContext(target_device="emulated") if built_on_shards else nullcontext():
        module = Blocks(num_blocks, width)
    found = {"built": resident_bytes()}
    _restart_peak()
    model = ShardedModel(
        module,
        dtype=torch.bfloat16,
        device="emulated",
        tensor_placement_policy="cpu",
        chunk_size=num_parameters(1, width),
        model_data_memory=6 * 2 * num_parameters(1, width),
    )
    found |= {"while wrapping": _peak_bytes(), "wrapped": resident_bytes()}
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3), clip_grad_norm=1.0)
    x = torch.linspace(-1, 1, TOKENS * width, dtype=torch.bfloat16).view(1, TOKENS, width)
    _restart_peak()
    for _ in range(STEPS):
        optimizer.backward(model(x).float().square().mean())
        found["after backward"] = resident_bytes()
        optimizer.step()
        optimizer.zero_grad()
        found["after the step"] = resident_bytes()
    return found | {"while training": _peak_bytes()}


def infer(rank: int, world_size: int, num_blocks: int, width: int) -> dict[str, int]:
    """Live storages and resident bytes of one rank of a bf16 model without an optimizer, everything on the host."""
    from gemini import ShardedModel

    torch.manual_seed(0)
    module = Blocks(num_blocks, width).bfloat16()
    model = ShardedModel(
        module,
        device="emulated",
        tensor_placement_policy="cpu",
        chunk_size=num_parameters(1, width),
        model_data_memory=8 * 2 * num_parameters(1, width),
    )
    x = torch.linspace(-1, 1, TOKENS * width, dtype=torch.bfloat16).view(1, TOKENS, width)
    with torch.no_grad():
        for _ in range(STEPS):
            model(x)
    return held_bytes()._asdict()


def _restart_peak() -> None:
    """The kernel's peak begins from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Resident pages at most since then, files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
