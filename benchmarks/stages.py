"""Bytes of a rank by ZeRO stage and by group of ranks, measured beside the formulas, and what a step sends and takes.

    python -m benchmarks.stages            # on 2 and 4 ranks; two minutes
    python -m benchmarks.stages --save     # also to benchmarks/results/stages.md
    python -m benchmarks.stages --tiny     # to see that it runs

fp16 with fp32 masters and Adam, as in the ZeRO paper: 2 + 2 + 12 bytes a parameter of weights, gradients and optimizer
state. Bytes are those that the memory of this process has given out between a backward and its step, without slots and
scratch, which do not grow with the model. bf16 takes 2 bytes fewer, because its masters are split. Everything is on the
emulated device. A step's time is of gloo on the cores that this machine shares among the ranks: it says what stages
cost beside one another here, and nothing of a GPU. All stages of a table take turns, a step each, so that other work on
the machine meets all of them alike; the spread is that of the quartiles. The last table is modelled: the formula for
many ranks.
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


GROUPS: dict[str, dict[str, Any]] = {
    "2 replicas of 2 shards": {"shard_group_size": 2},
    "groups of 2, states over all 4": {"shard_group_size": 2, "optimizer_shard": "all"},
    "one group, a second copy in each 2": {"secondary_group_size": 2},
}
"""How four ranks may be divided at stage 3."""


def ranks_case(rank: int, world_size: int, **options: Any) -> list[dict[str, Any]]:
    """For each wrapping: this rank's bytes by state before a step, the bytes that it sends in one, and its seconds."""
    from gemini import HybridAdam, ShardedModel, ShardedOptimizer

    dtype, width = getattr(torch, options["dtype"]), options["width"]
    found: list[dict[str, Any]] = []
    trainings = []
    for wrap in options["wraps"]:
        module = build(options["num_layers"], width, torch.float32)
        model = ShardedModel(module, dtype=dtype, device="emulated", tensor_placement_policy="cuda", **wrap)
        trainings.append((model, ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-4), clip_grad_norm=1.0)))
        found.append({"seconds": []})
    for _ in range(STEPS):
        for (model, optimizer), its in zip(trainings, found, strict=True):
            manager = model.chunk_manager
            before, start = manager.communicator.bytes_sent, time.perf_counter()
            optimizer.backward(loss_of(model, width, dtype))
            kinds = [tier.ledger.bytes_by_kind for tier in manager.memory.tiers]
            its["held"] = {part: sum(each.get(part, 0) for each in kinds) for part in PARTS}
            optimizer.step()
            optimizer.zero_grad()
            its["seconds"].append(time.perf_counter() - start)
            its["sent"] = manager.communicator.bytes_sent - before
    for model, _ in trainings:
        model.close()
    return found


def formula(stage: int, num_ranks: int) -> float:
    """Bytes a parameter of weights, gradients and optimizer state, each divided from its stage on."""
    of_states = ((2, 3), (2, 2), (12, 1))
    return sum(num_bytes / (num_ranks if stage >= first else 1) for num_bytes, first in of_states)


def formula_of_group(wrap: dict[str, Any], num_ranks: int) -> float:
    """The same at stage 3, where ranks are divided into groups."""
    size = wrap.get("shard_group_size", num_ranks)
    if wrap.get("optimizer_shard") == "all":  # and this rank's own part of the weights, beside those of its group
        return 4 / size + (12 + 2) / num_ranks
    copy = 2 / wrap["secondary_group_size"] if "secondary_group_size" in wrap else 0.0
    return 16 / size + copy


def table(num_ranks: int, num_layers: int, width: int) -> list[str]:
    """The rows for one number of ranks."""
    numel = num_parameters(num_layers, width)
    lines = [
        f"**{num_ranks} ranks**, {numel / 1e6:.1f} M parameters, of one rank, in bytes a parameter:",
        "",
        "| stage | weights | gradients | optimizer state | in all, measured | the formula | difference | times less | "
        "sent in a step | step, median (quartiles) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    wraps = [{"stage": stage} for stage in range(4)] + (list(GROUPS.values()) if num_ranks == 4 else [])
    names = [str(stage) for stage in range(4)] + [f"3, {words}" for words in GROUPS]
    options = {"dtype": "float16", "num_layers": num_layers, "width": width, "wraps": wraps}
    whole = 0.0
    for name, wrap, found in zip(
        names, wraps, run_ranks("benchmarks.stages:ranks_case", num_ranks, options, TIMEOUT_S)[0], strict=False
    ):
        each = {part: num_bytes / numel for part, num_bytes in found["held"].items()}
        total = sum(each.values())
        whole = whole or total
        states = each["master"] + each["optim"]
        wanted = formula(wrap["stage"], num_ranks) if "stage" in wrap else formula_of_group(wrap, num_ranks)
        first, median, third = (1000 * each for each in statistics.quantiles(found["seconds"][1:], n=4))
        lines.append(
            f"| {name} | {each['param']:.2f} | {each['grad']:.2f} | {states:.2f} | {total:.2f} | {wanted:.2f} | "
            f"{100 * (total / wanted - 1):+.1f} % | {whole / total:.2f} | {found['sent'] / numel:.2f} | "
            f"{median:.0f} ms ({first:.0f} to {third:.0f}) |"
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
        "*Modelled* by the formula, in bytes a parameter; the limits of many ranks are 4 bytes (4 times less) at stage "
        "1 and 2 bytes (8 times less) at stage 2:",
        "",
        "| ranks (modelled) | stage 0 | stage 1 | stage 2 | stage 3 |",
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
