"""Bytes of a rank by ZeRO stage, measured beside the formulas, and what a step sends and takes.

    python -m benchmarks.stages            # on 2 and 4 ranks; a minute
    python -m benchmarks.stages --save     # also to benchmarks/results/stages.md
    python -m benchmarks.stages --tiny     # to see that it runs

fp16 with fp32 masters and Adam, as in the ZeRO paper: 2 + 2 + 12 bytes a parameter of weights, gradients and optimizer
state. Bytes are those that the memory of this process has given out between a backward and its step, without slots and
scratch, which do not grow with the model. bf16 takes 2 bytes fewer, because its masters are split. Everything is on the
emulated device. A step's time is of gloo on the cores that this machine shares among the ranks: it says what stages
cost beside one another here, and nothing of a GPU. The last table has the formula for many ranks.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import torch
import typer

from benchmarks.bytes_cases import build, loss_of, num_parameters
from benchmarks.launch import ROOT, run_ranks

OUT = ROOT / "benchmarks" / "results" / "stages.md"
PARTS = ("param", "grad", "master", "optim")
STEPS = 7
TIMEOUT_S = 300.0


def ranks_case(rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    """One rank's bytes by state before a step, the bytes that it sends in one, and the median seconds of a step."""
    from gemini import HybridAdam, ShardedModel, ShardedOptimizer

    dtype, width = getattr(torch, options.pop("dtype")), options.pop("width")
    module = build(options.pop("num_layers"), width, torch.float32)
    model = ShardedModel(module, dtype=dtype, device="emulated", tensor_placement_policy="cuda", **options)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-4), clip_grad_norm=1.0)
    manager, seconds, held, sent = model.chunk_manager, [], {}, 0
    for _ in range(STEPS):
        before, start = manager.communicator.bytes_sent, time.perf_counter()
        optimizer.backward(loss_of(model, width, dtype))
        kinds = [tier.ledger.bytes_by_kind for tier in manager.memory.tiers]
        held = {part: sum(each.get(part, 0) for each in kinds) for part in PARTS}
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        sent = manager.communicator.bytes_sent - before
    model.close()
    return {"held": held, "sent": sent, "seconds": statistics.median(seconds[1:])}


def formula(stage: int, num_ranks: int) -> float:
    """Bytes a parameter of weights, gradients and optimizer state, each divided from its stage on."""
    of_states = ((2, 3), (2, 2), (12, 1))
    return sum(num_bytes / (num_ranks if stage >= first else 1) for num_bytes, first in of_states)


def table(num_ranks: int, num_layers: int, width: int) -> list[str]:
    """The rows for one number of ranks."""
    numel = num_parameters(num_layers, width)
    lines = [
        f"**{num_ranks} ranks**, {numel / 1e6:.1f} M parameters, of one rank:",
        "",
        "| stage | weights | gradients | optimizer state | in all | the formula | times less | sent in a step | step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    whole = 0.0
    for stage in range(4):
        options = {"dtype": "float16", "num_layers": num_layers, "width": width, "stage": stage}
        found = run_ranks("benchmarks.stages:ranks_case", num_ranks, options, TIMEOUT_S)[0]
        each = {part: num_bytes / numel for part, num_bytes in found["held"].items()}
        total = sum(each.values())
        whole = whole or total
        states = each["master"] + each["optim"]
        lines.append(
            f"| {stage} | {each['param']:.2f} | {each['grad']:.2f} | {states:.2f} | {total:.2f} bytes a parameter | "
            f"{formula(stage, num_ranks):.2f} | {whole / total:.2f} | {found['sent'] / numel:.2f} bytes a parameter | "
            f"{1000 * found['seconds']:.0f} ms |"
        )
    return lines


def main(
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/stages.md.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="The smallest size.")] = False,
) -> None:
    """Print what a rank holds at each stage, measured and by the formula."""
    num_layers, width = (4, 128) if tiny else (12, 1024)
    lines = []
    for num_ranks in (2, 4):
        lines += [*table(num_ranks, num_layers, width), ""]
    lines += [
        "By the formula, in bytes a parameter:",
        "",
        "| ranks | stage 0 | stage 1 | stage 2 | stage 3 |",
        "|---|---|---|---|---|",
        *(
            f"| {count:,} | "
            + " | ".join(
                f"{formula(s, count):.2f} ({formula(0, 1) / formula(s, count):.1f} times less)" for s in range(4)
            )
            + " |"
            for count in (8, 64, 1024)
        ),
    ]
    text = "\n".join(lines)
    typer.echo(text)
    if save:
        OUT.write_text(f"`python -m benchmarks.stages`\n\n{text}\n")


if __name__ == "__main__":
    typer.run(main)
