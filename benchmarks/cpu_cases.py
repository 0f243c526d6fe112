"""The ways of training one GPT-2 on the CPU that are compared: plain, ours at several budgets, FSDP2.

All cases have the same weights, batches, learning rate and clipping, so their losses must agree: bit for bit where
one rank trains in fp32, and up to rounding beside FSDP2.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gemini
from benchmarks import fsdp2
from benchmarks.gpt2 import gpt2
from benchmarks.rounds import StepTime, turn
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

LEARNING_RATE = 1e-3
MAX_NORM = 1.0
WARM_UP = 3
BYTES_PER_PARAMETER = 16  # fp32: parameter, gradient, two moments


@dataclass
class Case:
    """One way to train. `clip` belongs to the optimizer's time."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    times: list[StepTime] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, tokens: Tensor) -> None:
        started, cpu_started = time.perf_counter(), time.process_time()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        between = time.perf_counter()
        if self.clip is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        ended, cpu_ended = time.perf_counter(), time.process_time()
        self.times.append(StepTime(between - started, ended - between, cpu_ended - cpu_started))
        self.losses.append(loss.item())


def build(tiny: bool) -> tuple[nn.Module, Callable[[int, int], Tensor]]:
    """(GPT-2 in fp32 without dropout, tokens of (step, rank)); 26 M parameters, or 0.4 M."""
    vocab, positions, width, layers, heads = (256, 32, 64, 8, 4) if tiny else (2048, 128, 512, 8, 8)
    model = gpt2(vocab=vocab, positions=positions, width=width, layers=layers, heads=heads)

    def tokens(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1 + 1000 * step + rank)
        return torch.randint(0, vocab, (2, positions), generator=generator)  # (batch, sequence)

    return model, tokens


def plain(tiny: bool, clips: bool) -> Case:
    """The ordinary loop with our Adam, so that its arithmetic is the same."""
    model, _ = build(tiny)
    parameters = list(model.parameters())
    clip = partial(gemini.clip_grad_norm_, parameters, MAX_NORM) if clips else None
    return Case(model, HybridAdam(parameters, lr=LEARNING_RATE), clip)


def ours(tiny: bool, clips: bool, budget_bytes: int | None = None) -> Case:
    module, _ = build(tiny)
    model = ShardedModel(module, device="emulated", model_data_memory=budget_bytes)
    adam = HybridAdam(model.parameters(), lr=LEARNING_RATE)
    optimizer = ShardedOptimizer(model, adam, clip_grad_norm=MAX_NORM if clips else None)
    return Case(model, optimizer, facts={"budget_bytes": budget_bytes})


def peer(tiny: bool, clips: bool, reshard: bool) -> Case:
    """FSDP2 with torch's fastest AdamW. Collective."""
    model, _ = build(tiny)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    fsdp2.shard(model, mesh, reshard)
    parameters = list(model.parameters())
    clip = partial(torch.nn.utils.clip_grad_norm_, parameters, MAX_NORM) if clips else None
    return Case(model, torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True), clip)


def _rounds(cases: dict[str, Case], rank: int, rounds: int, tokens: Callable[[int, int], Tensor]) -> dict[str, Any]:
    """Warm up, then let all cases take turns; what is left of each is numbers."""
    gc.collect()
    for number in range(-WARM_UP, rounds):
        for name in turn(list(cases), number):
            if dist.is_initialized():
                dist.barrier()
            cases[name].step(tokens(number + WARM_UP, rank))
    result = {}
    for name, case in cases.items():
        if isinstance(case.model, ShardedModel):
            case.facts |= _facts(case.model)
        times = [astuple(time) for time in case.times[WARM_UP:]]
        result[name] = {"times_s": times, "losses": case.losses, "facts": case.facts}
    return result


def _facts(model: ShardedModel) -> dict[str, Any]:
    manager = model.chunk_manager
    device, host = manager.memory.tiers
    return {
        "chunks": len(manager.chunks),
        "chunk_bytes": model.plan.packing.chunk_bytes,
        "device_peak_bytes": device.ledger.peak_bytes,
        "host_peak_bytes": host.ledger.peak_bytes,
        "fetches": model.observer.num_fetches,
        "evictions": model.observer.counts["evict"],
        "bytes_by_link": dict(model.chunk_manager.memory.transfer.bytes_by_link),
        "bytes_sent": manager.communicator.collectives.bytes_sent,
        "memory_report": model.memory_report(),
    }


def one_rank(rank: int, world_size: int, tiny: bool, rounds: int, clips: bool) -> dict[str, Any]:
    """Plain, ours with everything fitting, ours with half the model data on the device."""
    model, tokens = build(tiny)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    half_bytes = num_parameters * BYTES_PER_PARAMETER // 2
    cases = {
        "plain": plain(tiny, clips),
        "ours": ours(tiny, clips),
        "ours, half": ours(tiny, clips, half_bytes),
    }
    return {"num_parameters": num_parameters, "cases": _rounds(cases, rank, rounds, tokens)}


def two_ranks(rank: int, world_size: int, tiny: bool, rounds: int, clips: bool) -> dict[str, Any]:
    """FSDP2 with and without resharding, and ours at the bytes of model data that each of them peaks at."""
    model, tokens = build(tiny)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    cases: dict[str, Case] = {}
    for setting, reshard in (("reshard", True), ("no reshard", False)):
        theirs = peer(tiny, clips, reshard)
        peak = fsdp2.peak_model_data(theirs.model, theirs.optimizer, partial(theirs.step, tokens(0, rank)))
        smallest = torch.tensor(peak["total"])
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        del theirs  # its two steps under the watch are not part of the comparison
        cases[f"FSDP2, {setting}"] = peer(tiny, clips, reshard)
        cases[f"FSDP2, {setting}"].facts["peak_model_data"] = peak
        cases[f"ours, {setting} budget"] = ours(tiny, clips, int(smallest))
    return {"num_parameters": num_parameters, "cases": _rounds(cases, rank, rounds, tokens)}
