"""Adapts a small GPT-2 to other text with LoRA: a frozen trunk, a few trained adapters, both in chunks.

    python examples/lora.py                                        # one rank
    torchrun --nproc-per-node 2 examples/lora.py                   # each rank reads its own text
    torchrun --nproc-per-node 2 examples/lora.py --model-data-memory 2MiB

First all of the model learns bytes of the standard library's modules. Then its trunk is frozen, peft puts adapters into
it, and only these learn the bytes of one package. Frozen chunks are sharded and offloaded like all others, and hold
neither gradients nor optimizer state: compare the two memory reports.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Annotated

import peft
import torch
import torch.distributed as dist
import typer
from budget import a_third
from moe import VOCABULARY, corpus
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import gemini
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam


def package(name: str) -> Tensor:
    """The bytes of a package's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / name
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(
    module: nn.Module,
    text: Tensor,
    what: str,
    *,
    steps: int,
    batch: int,
    length: int,
    lr: float,
    budget: str | None,
    console: Console,
) -> ShardedModel:
    """The wrapped module after `steps`. Collective."""
    model = ShardedModel(module, model_data_memory=budget or a_third(module))
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ShardedOptimizer(model, HybridAdam(learning, lr=lr), clip_grad_norm=1.0)
    generator = torch.Generator().manual_seed(1 + model.rank)  # each rank reads elsewhere
    started, losses = time.perf_counter(), []
    for _ in track(range(steps), what, console=console):
        starts = torch.randint(0, len(text) - length, (batch,), generator=generator).tolist()
        pieces = torch.stack([text[start : start + length] for start in starts]).to(gemini.current_device())
        loss = model(input_ids=pieces, labels=pieces).loss
        optimizer.backward(loss)
        optimizer.step()
        mean = loss.detach().clone()
        if model.world_size > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / model.world_size)
    count, every = sum(p.numel() for p in learning), sum(p.numel() for p in model.parameters())
    console.print(f"{what}: {count} of {every} parameters are trained ({count / every:.1%})")
    few = max(1, steps // 10)
    first, last = (sum(some) / few for some in (losses[:few], losses[-few:]))
    console.print(f"{what}: mean loss {first:.3f} in the first {few} steps, {last:.3f} in the last of {steps}")
    tokens_per_s = steps * batch * length * model.world_size / (time.perf_counter() - started)
    console.print(f"{what}: {tokens_per_s:.0f} tokens/s")
    console.print(model.memory_report(), markup=False)
    return model


def main(
    pretraining_steps: Annotated[int, typer.Option(min=1, help="Steps of the whole model.")] = 150,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the adapters.")] = 100,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 4,
    width: Annotated[int, typer.Option(min=8, help="Model width, a multiple of 4.")] = 64,
    rank_of_adapters: Annotated[int, typer.Option(min=1, help="LoRA's r.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Bytes of context.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Pieces of text a rank and step.")] = 4,
    lr: Annotated[float, typer.Option(help="Adam's learning rate; the adapters get five times as much.")] = 2e-3,
    text: Annotated[str, typer.Option(help="The package of the standard library that the adapters learn.")] = "json",
    model_data_memory: Annotated[
        str | None, typer.Option(help="Model data on the device, such as 2MiB. Default: a third of it.")
    ] = None,
) -> None:
    """Train a small GPT-2, freeze it, and adapt it with LoRA."""
    gemini.launch_from_torch(seed=0, verbose=False)
    quiet = dist.is_initialized() and dist.get_rank() != 0
    console = Console(quiet=quiet, soft_wrap=True, highlight=False)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": length, "n_embd": width, "n_layer": layers, "n_head": 4}
    plain = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
    config = GPT2Config(**sizes, **plain)
    common = {"batch": batch, "length": length, "budget": model_data_memory, "console": console}
    model = train(GPT2LMHeadModel(config), corpus(500_000), "all", steps=pretraining_steps, lr=lr, **common)
    state = model.state_dict()
    model.close()

    trunk = GPT2LMHeadModel(config)
    trunk.load_state_dict(state)
    targets = ["c_attn", "c_proj", "c_fc"]
    adapters = peft.LoraConfig(r=rank_of_adapters, lora_alpha=16, target_modules=targets, fan_in_fan_out=True)
    adapted = peft.get_peft_model(trunk, adapters)
    model = train(adapted, package(text), "adapters", steps=steps, lr=5 * lr, **common)
    saved = peft.get_peft_model_state_dict(model.module, state_dict=model.state_dict())
    console.print(f"to save: {len(saved)} tensors of {sum(tensor.nbytes for tensor in saved.values())} bytes")
    model.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
