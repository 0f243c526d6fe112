"""Fine-tunes the last blocks of a GPT-NeoX; the frozen trunk is sharded and offloaded, without gradients or moments.

    python examples/finetune_neox.py                                            # a small one with random weights
    torchrun --nproc-per-node 2 examples/finetune_neox.py --model-data-memory 3MiB
    torchrun --nproc-per-node 8 examples/finetune_neox.py --checkpoint DIRECTORY --dtype bf16 --train-blocks 4

DIRECTORY holds a model of the NeoX family as `save_pretrained` wrote it: its safetensors are streamed, so that no rank
ever has it whole. The text is the source of Python's own standard library, in the directory's tokens if it has a
tokenizer, else in bytes.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

import gemini
from gemini import ShardedModel, ShardedOptimizer, ZeroInitContext
from optim import HybridAdam

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(checkpoint: Path | None, layers: int, width: int) -> Any:
    """On shards already; rank 0's weights, if they are random."""
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    with ZeroInitContext():
        if checkpoint is not None:
            return AutoModelForCausalLM.from_pretrained(checkpoint)
        config = GPTNeoXConfig(
            vocab_size=256,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_id=0,
        )
        return AutoModelForCausalLM.from_config(config)


def freeze_trunk(model: Any, train_blocks: int) -> None:
    """All but the last blocks, the norm after them and the head."""
    model.requires_grad_(False)
    trunk = model.gpt_neox
    for part in (*trunk.layers[-train_blocks:], trunk.final_layer_norm, model.get_output_embeddings()):
        part.requires_grad_(True)


def read_tokens(checkpoint: Path | None, num_bytes: int) -> Tensor:
    """(tokens,) int64, of the standard library's modules in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    if checkpoint is not None and (checkpoint / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        return torch.tensor(tokenizer(text[:num_bytes].decode(errors="replace"))["input_ids"])
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8).long()


def main(
    checkpoint: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A saved model; default: random weights.")
    ] = None,
    train_blocks: Annotated[int, typer.Option(min=1, help="Blocks that are trained, from the last one.")] = 1,
    layers: Annotated[int, typer.Option(min=2, help="Blocks of the small model.")] = 6,
    width: Annotated[int, typer.Option(min=16, help="Width of the small model, a multiple of 16.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 60,
    batch: Annotated[int, typer.Option(min=1, help="Pieces of text a rank and step.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a piece.")] = 64,
    lr: Annotated[float, typer.Option(help="Adam's learning rate.")] = 2e-3,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Of the weights on the device.")] = "fp32",
    corpus_bytes: Annotated[int, typer.Option(min=4096, help="Bytes of source to train on.")] = 1_000_000,
    model_data_memory: Annotated[
        str | None, typer.Option(help="Model data on the device, such as 3MiB. Default: a third of it.")
    ] = None,
) -> None:
    """Fine-tune the last blocks of a GPT-NeoX."""
    gemini.launch_from_torch(verbose=False)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    console = Console(quiet=rank != 0, soft_wrap=True)
    module = build(checkpoint, layers, width)
    if train_blocks > len(module.gpt_neox.layers):
        raise typer.BadParameter(f"the model has {len(module.gpt_neox.layers)} blocks", param_hint="--train-blocks")
    freeze_trunk(module, train_blocks)
    counts = [sum(p.numel() for p in module.parameters() if p.requires_grad is flag) for flag in (True, False)]
    # A third of the state: weights and gradients, masters and moments of 12 bytes for each element that is trained.
    state_bytes = 16 * counts[0] + 4 * counts[1]
    budget = model_data_memory or state_bytes // 3 // world_size
    model = ShardedModel(module, dtype=DTYPES[dtype], model_data_memory=budget)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ShardedOptimizer(model, HybridAdam(trained, lr=lr), clip_grad_norm=1.0)
    console.print(f"model: {counts[0]:,} parameters are trained, {counts[1]:,} are frozen")
    tokens, device = read_tokens(checkpoint, corpus_bytes), gemini.current_device()
    generator = torch.Generator().manual_seed(1 + rank)  # each rank reads elsewhere
    started, losses = time.perf_counter(), []
    for _ in track(range(steps), "training", console=console):
        starts = torch.randint(0, len(tokens) - length, (batch,), generator=generator).tolist()
        pieces = torch.stack([tokens[start : start + length] for start in starts]).to(device)
        loss = model(input_ids=pieces, labels=pieces).loss
        optimizer.backward(loss)
        optimizer.step()
        mean = loss.detach().float().clone()
        if world_size > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / world_size)
    console.print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {steps} steps")
    tokens_per_s = steps * batch * length * world_size / (time.perf_counter() - started)
    console.print(f"speed: {tokens_per_s:.0f} tokens/s")
    console.print(model.memory_report(), markup=False)
    model.close()


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
