"""Tensor parallelism and ZeRO: a small language model on the bytes of Python's own standard library.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py                  # 2 parts of tensors x 2 shards
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --parts 1        # the same training, ZeRO over 4 ranks
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --save folder    # a checkpoint, which any mesh loads
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --load folder    # as here, on 2 parts and one shard

torch divides the tensors: `parallelize_module` makes them DTensors of the mesh's dimension "tp", which should lie
inside a machine. gemini shards what each rank has of them along "dp", and moves it between device and host as ever.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gemini
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

VOCABULARY = 256  # bytes


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // num_heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        # A rank has some of the heads: how many says the width of what comes.
        parts = (each(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in self.queries())
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    def queries(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value


class Model(nn.Module):
    def __init__(self, width: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def divide(model: Model, parts: DeviceMesh) -> nn.Module:
    """Columns of what makes heads and hidden units, and rows of what brings them together again."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        for name in ("query", "key", "value", "up"):
            plan[f"blocks.{number}.{name}"] = ColwiseParallel()
        for name in ("out", "down"):
            plan[f"blocks.{number}.{name}"] = RowwiseParallel()
    return parallelize_module(model, parts, plan)


def main(
    parts: Annotated[int, typer.Option(help="ranks that divide each tensor")] = 2,
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 20,
    batch: Annotated[int, typer.Option(help="sequences a step, over all ranks")] = 8,
    width: Annotated[int, typer.Option(help="of the model")] = 64,
    layers: Annotated[int, typer.Option(help="of the model")] = 2,
    context: Annotated[int, typer.Option(help="tokens a sequence")] = 64,
    policy: Annotated[str, typer.Option(help="where model data rests: auto, cpu, cuda, disk")] = "auto",
    save: Annotated[Path | None, typer.Option(help="directory for a checkpoint at the end")] = None,
    load: Annotated[Path | None, typer.Option(help="directory of a checkpoint to go on from")] = None,
) -> None:
    """Train, and print the mean loss of each step on rank 0."""
    gemini.launch_from_torch()
    device = gemini.current_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size() // parts, parts), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # all ranks: what is not divided must be equal in all parts
    model = ShardedModel(
        divide(Model(width, layers, num_heads=4, context=context), mesh["tp"]),
        device_mesh=mesh["dp"],
        tensor_placement_policy=policy,
    )
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3), clip_grad_norm=1.0)
    first = 0
    if load is not None:
        first = int(gemini.load_checkpoint(load, model, optimizer).step or 0)
    text = torch.frombuffer(bytearray(source()), dtype=torch.uint8).long()
    # Ranks of one "dp" coordinate are parts of one model, and see the same batch.
    place, num_data = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for step in range(first, first + steps):
        starts = torch.randint(0, len(text) - context - 1, (batch,), generator=torch.Generator().manual_seed(step))
        rows = [text[start : start + context + 1] for start in starts.tolist()]
        own = torch.stack(rows[place::num_data]).to(device)
        loss = nn.functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {float(mean) / num_data:.6f}, norm {float(optimizer.grad_norm):.4f}")
    if save is not None:
        gemini.save_checkpoint(save, model, optimizer)
    model.close()


def source() -> bytes:
    """Half a megabyte of the standard library."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(path.read_bytes() for path in paths)[: 2**19]


if __name__ == "__main__":
    typer.run(main)
