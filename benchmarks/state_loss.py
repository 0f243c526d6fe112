"""What moments of 8 and of 16 bits cost in loss: a small GPT on Python code, beside fp32 moments.

    python -m benchmarks.state_loss            # 500 steps, 3 seeds: a few minutes
    python -m benchmarks.state_loss --tiny     # 20 steps, to see that it runs

A seed is of the weights and of the batches, which all formats of one seed share. Bits are those of any number of ranks
and any placement, so one plain model says it for all. The loss is the mean of the last tenth of the steps. What a
distance means is shown by a second training with fp32 moments, in which the last bit of one weight is another.
"""

from __future__ import annotations

import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.launch import ROOT
from optim import HybridAdam, clip_grad_norm_

OTHER_BIT = "fp32, one last bit"
FORMATS: dict[str, Any] = {"fp32": None, OTHER_BIT: None, "8bit": "8bit", "bf16": torch.bfloat16}
BATCH, CONTEXT, VOCABULARY = 8, 64, 128
RATE = 1.5e-3
WANTED = 0.005  # of the fp32 loss


def model_of(seed: int) -> nn.Module:
    """A GPT of 0.1 M parameters over bytes, whose matrices are large enough for 8 bits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def batches(seed: int, steps: int) -> Iterator[Tensor]:
    """(BATCH, CONTEXT) bytes of the standard library each, as in the demo."""
    text = "".join(path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")))
    tokens = torch.tensor([min(ord(letter), VOCABULARY - 1) for letter in text])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        yield torch.stack([tokens[start : start + CONTEXT] for start in starts])


def loss_after(moments: str, seed: int, steps: int) -> float:
    """The mean loss of the last tenth of the steps. moments: a key of `FORMATS`."""
    model, state_dtype = model_of(seed), FORMATS[moments]
    if moments == OTHER_BIT:
        first = next(model.parameters()).data.view(-1)
        first[0] = torch.nextafter(first[0], torch.tensor(torch.inf))
    # The recipe of the demo, `examples/train_gpt.py`: rates that rise, and fall to a tenth, and clipped gradients.
    optimizer = HybridAdam(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, state_dtype=state_dtype)
    schedules = torch.optim.lr_scheduler
    rises = schedules.LinearLR(optimizer, 0.1, total_iters=steps // 10)
    falls = schedules.CosineAnnealingLR(optimizer, steps - steps // 10, eta_min=RATE / 10)
    schedule = schedules.SequentialLR(optimizer, [rises, falls], [steps // 10])
    losses = []
    for tokens in batches(seed, steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each training.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="20 steps: no figures to quote.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/state_loss*.json.")] = False,
) -> None:
    """Print the loss with moments of each format, and its distance from that with fp32 ones."""
    steps = 20 if tiny else steps
    found = {name: [loss_after(name, seed, steps) for seed in range(seeds)] for name in FORMATS}
    table = Table(title=f"loss after {steps} steps, distance from fp32 moments")
    for column in ("moments", *(f"seed {seed}" for seed in range(seeds)), "largest distance"):
        table.add_column(column)
    far = 0.0
    for name, losses in found.items():
        distances = [loss / of_fp32 - 1 for loss, of_fp32 in zip(losses, found["fp32"], strict=True)]
        far = max(far, *map(abs, distances)) if name != OTHER_BIT else far
        cells = [f"{loss:.4f} ({each:+.2%})" for loss, each in zip(losses, distances, strict=True)]
        table.add_row(name, *cells, f"{max(map(abs, distances)):.2%}")
    Console(width=110).print(table)
    if save:
        path = ROOT / "benchmarks" / "results" / f"state_loss{'_tiny' if tiny else ''}.json"
        path.write_text(
            json.dumps(
                {"python": platform.python_version(), "torch": torch.__version__, "steps": steps, "losses": found},
                indent=1,
            )
            + "\n"
        )
    if far > WANTED and not tiny:
        typer.echo(f"{far:.2%} is more than {WANTED:.1%}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
