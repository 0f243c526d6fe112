"""Three dimensions: torch's pipeline schedules, tensor parallelism and ZeRO, on the model of tensor_parallel.py.

    torchrun --nproc-per-node 4 examples/pipeline.py               # 2 stages x 2 shards
    torchrun --nproc-per-node 8 examples/pipeline.py --parts 2     # 2 stages x 2 shards x 2 parts of tensors
    torchrun --nproc-per-node 2 examples/pipeline.py --stages 1    # the same training without a pipeline

A stage is a `ShardedModel` of its own, over the ranks of the mesh's dimension "dp". It gets the whole mesh: the norm,
by which it clips, is that of all stages and parts. torch's schedule calls its forward and backward, in an order of its
own.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.distributed as dist
import typer
from tensor_parallel import Block, Model, source
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gemini
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

WIDTH, LAYERS, HEADS, CONTEXT = 64, 4, 4, 64


class Stage(nn.Module):
    """Some of the model's blocks, with what comes before the first and behind the last of them."""

    def __init__(self, whole: Model, place: int, of: int) -> None:
        super().__init__()
        self.is_first, self.is_last = place == 0, place == of - 1
        if self.is_first:
            self.embed, self.positions = whole.embed, whole.positions
        each = LAYERS // of
        self.blocks = nn.ModuleDict({str(n): whole.blocks[n] for n in range(place * each, (place + 1) * each)})
        if self.is_last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def plan_of(stage: Stage) -> dict[str, ColwiseParallel | RowwiseParallel]:
    """As `divide` of tensor_parallel.py, for the parts that this stage has."""
    plan: dict[str, ColwiseParallel | RowwiseParallel] = {}
    for name, module in stage.named_modules():
        if isinstance(module, Block):
            plan |= {f"{name}.{each}": ColwiseParallel() for each in ("query", "key", "value", "up")}
            plan |= {f"{name}.{each}": RowwiseParallel() for each in ("out", "down")}
    if stage.is_first:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    if stage.is_last:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def main(
    stages: Annotated[int, typer.Option(help="of the pipeline: 1, 2 or 4")] = 2,
    parts: Annotated[int, typer.Option(help="ranks that divide each tensor")] = 1,
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 10,
    batch: Annotated[int, typer.Option(help="sequences a step, over all ranks")] = 16,
    micro_batches: Annotated[int, typer.Option(help="into which a rank's sequences are divided")] = 4,
    policy: Annotated[str, typer.Option(help="where model data rests: auto, cpu, cuda, disk")] = "auto",
) -> None:
    """Train, and print the mean loss of each step on the last rank."""
    gemini.launch_from_torch()
    device = gemini.current_device()
    num_data = dist.get_world_size() // (stages * parts)
    mesh = init_device_mesh(device.type, (stages, num_data, parts), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    place = mesh["pp"].get_local_rank()
    module = Stage(Model(WIDTH, LAYERS, HEADS, CONTEXT), place, stages)
    divided = parallelize_module(module, mesh["tp"], plan_of(module)) if parts > 1 else module
    model = ShardedModel(divided, device_mesh=mesh, tensor_placement_policy=policy)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3), clip_grad_norm=1.0)
    stage = PipelineStage(model, place, stages, device, group=mesh["pp"].get_group())
    # Losses of micro-batches are means: their sum is divided here, and not by a pass over all gradients.
    schedule = Schedule1F1B(
        stage, micro_batches, loss_fn=lambda *pair: loss_of(*pair) / micro_batches, scale_grads=False
    )
    text = torch.frombuffer(bytearray(source()), dtype=torch.uint8).long()
    for step in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (batch,), generator=torch.Generator().manual_seed(step))
        rows = [text[start : start + CONTEXT + 1] for start in starts.tolist()]
        own = torch.stack(rows[mesh["dp"].get_local_rank() :: num_data]).to(device)
        losses: list[Tensor] = []
        inputs = (own[:, :-1],) if module.is_first else ()
        wanted = {"target": own[:, 1:], "losses": losses} if module.is_last else {}
        schedule.step(*inputs, **wanted)
        optimizer.step()
        optimizer.zero_grad()
        if module.is_last:
            mean = torch.stack([each.detach() for each in losses]).sum()
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            if dist.get_rank() == dist.get_world_size() - 1:
                print(f"step {step + 1}: loss {float(mean) / num_data:.6f}, norm {float(optimizer.grad_norm):.4f}")
    model.close()


if __name__ == "__main__":
    typer.run(main)
