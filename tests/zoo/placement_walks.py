"""Random walks of weights in 16 bits: a model under any budget beside the same one that lies whole on its device.

No plain model has fp32 masters, a loss scale and a clipped step, so what is held against each other are placements:
policy, stage, chunk size and budget must not change a bit (tests/dist compare the training itself with
a plain one). The operations are those of `walks.py`.
"""

import random
from typing import Any

import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam
from tests.harness.devices import CPU, emulated
from tests.zoo.walks import OPTIMIZERS, Walk, assert_same, build

# A batch norm of 16-bit weights needs buffers in them too, and those keep their dtype.
NORM = {nn.BatchNorm1d: torch.float32}
DTYPES: list[dict[Any, torch.dtype | None]] = [
    {**NORM, "*": torch.bfloat16},
    {**NORM, "*": torch.float16},
    {**NORM, nn.LayerNorm: torch.float32, "*": torch.bfloat16},
    {**NORM, "blocks.1": torch.float16, "*": torch.bfloat16},
    {"blocks.*.up": torch.bfloat16, "*": None},
]


class PlacementWalk(Walk):
    """`model` has the drawn placement; `plain` is wrapped too, with everything on the device."""

    optimizers = {**OPTIMIZERS, "hybrid": lambda groups: HybridAdam(groups, lr=1e-2)}

    # The first time that a 16-bit gradient comes in pieces, from a reentrant part that is used twice, these are added
    # up in 16 bits or in fp32, as the chunk is still open or not (docs/decisions.md).
    checkpoints = None, False

    def __init__(self, chance: random.Random, world_size: int, rank: int, device: torch.device = CPU) -> None:
        self.rank = rank
        # These decide in which dtype a gradient rests, and so how an edit of it between micro-batches is rounded.
        accumulate = chance.choice([None, None, torch.float32])
        self.shared: dict[str, Any] = {
            "dtype": chance.choice(DTYPES),
            "reduce_dtype": chance.choice([None, None, torch.float32]),
            "accumulate_dtype": accumulate,
            "reuse_fp16_shard": accumulate is None and chance.random() < 0.4,
            "gradient_accumulation_steps": chance.choice([None, 1, 2]),
        }
        self.clipping = chance.choice([None, 0.3])
        super().__init__(chance, world_size, device)

    def number(self) -> int:
        """Ranks have batches of their own."""
        return super().number() + 1000 * self.rank

    def draw_options(self) -> dict[str, Any]:
        return {**super().draw_options(), **self.shared}

    def build_plain(self) -> nn.Module:
        whole = {"tensor_placement_policy": "cuda", **self.shared}
        if self.world_size > 1:  # which decides the order in which gradients of ranks are added up
            whole["stage"] = self.options["stage"]
        return ShardedModel(build(), device=emulated(self.device), rank_timeout=60, **whole)

    def finish(self, model: Any, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        return ShardedOptimizer(model, optimizer, clip_grad_norm=self.clipping, initial_scale=2.0**8)

    def scale(self, optimizer: Any, loss: Tensor) -> Tensor:
        scaled: Tensor = optimizer.scale(loss)
        return scaled

    def compare(self) -> None:
        super().compare()
        if self.chance.random() < 0.3:
            ours, its = self.both(lambda _, optimizer: optimizer.state_dict())
            for part in ("state", "masters"):
                assert list(ours[part]) == list(its[part]), part
            for number, entry in its["state"].items():
                assert list(ours["state"][number]) == list(entry), number
                for name, value in entry.items():
                    assert_same(ours["state"][number][name], value, f"{name} of {number}")
            for number, master in its["masters"].items():
                assert_same(ours["masters"][number], master, f"master of {number}")
