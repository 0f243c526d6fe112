"""What `benchmarks.adam` lets take turns: the machine's bandwidth, our kernels, and torch's ways of the same update.

Cases of a group do the same work with the same number of threads, right after one another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.adam_memory import GRADS, Memory, Work
from benchmarks.streams import Mode, has_nontemporal, read_stream, update_streams
from optim import cpu_adam, cpu_norm, norm, reference
from optim.cpu_extension import levels
from optim.piece import AdamScalars, adam_scalars

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
STEP = 1000
CALLS = 3
"""Timed calls of a turn, after one that is not timed; the median is the turn's time."""

BANDWIDTH, OURS, FALLBACK, PEER = "bandwidth", "ours", "fallback", "peer"

# what update_streams and read_stream are tried with; the best one of a group is the machine's bandwidth
UPDATE_VARIANTS: dict[str, dict[str, Any]] = {
    "blocks of 64": {"block": 64},
    "blocks of 64, prefetched": {"block": 64, "ahead_bytes": 2048},
    "blocks of 256": {"block": 256},
    "blocks of 1024": {"block": 1024},
    "blocks of 64, non-temporal": {"block": 64, "ahead_bytes": 2048, "nontemporal": True},
}
READ_VARIANTS: dict[str, dict[str, Any]] = {
    "one place": {},
    "two places": {"lanes": 2},
    "four places": {"lanes": 4},
    "four places, prefetched": {"lanes": 4, "ahead_bytes": 2048},
}


@dataclass(frozen=True)
class Case:
    """One way to do the work of a group."""

    name: str
    role: str  # BANDWIDTH, OURS (a kernel), FALLBACK (plain torch operations) or PEER
    num_elements: int
    traffic_bytes: int
    turn: Callable[[], float]  # seconds of one call


@dataclass(frozen=True)
class Group:
    """The same work with the same number of threads."""

    work: str
    num_threads: int
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        return f"{self.work}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"


def local_turn(call: Callable[[], object], num_threads: int) -> float:
    """Seconds of `call` in this process."""
    torch.set_num_threads(num_threads)
    call()
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def update_group(memory: Memory, work: Work, num_threads: int, others: tuple[Case, ...] = ()) -> Group:
    """Bandwidth, ours at every level, the fallback, what torch has for this work, and `others`."""
    calls = [*_bandwidth(memory, work, num_threads), *_ours(memory, work, num_threads), *_torch_ways(memory, work)]
    cases = tuple(
        Case(name, role, memory.numel, traffic_bytes, partial(local_turn, call, num_threads))
        for name, role, traffic_bytes, call in calls
    )
    return Group(str(work), num_threads, cases + others)


def norm_group(memory: Memory, dtype: str, num_threads: int) -> Group:
    """The norm's pass over a gradient beside reading it."""
    flat = memory.norm_input(dtype)
    limbs = norm.zero_norm_limbs()
    calls: list[tuple[str, str, Callable[[], object]]] = [
        (f"read: {name}", BANDWIDTH, partial(read_stream, flat, num_threads=num_threads, **options))
        for name, options in READ_VARIANTS.items()
    ]
    calls.append(("read: torch.sum", BANDWIDTH, flat.view(torch.float32).sum))
    if cpu_adam.is_available():
        for level in levels():
            kernel = partial(cpu_norm.accumulate_sum_of_squares_, num_threads=num_threads, level=level)
            calls.append((f"ours: {level}", OURS, partial(_into_zeroed, kernel, limbs, flat)))
    calls.append(("ours: plain torch", FALLBACK, partial(_into_zeroed, norm.accumulate_sum_of_squares_, limbs, flat)))
    cases = tuple(
        Case(name, role, flat.numel(), flat.nbytes, partial(local_turn, call, num_threads))
        for name, role, call in calls
    )
    return Group(f"norm, {dtype}", num_threads, cases)


def all_norms(memory: Memory, num_threads: int) -> list[Group]:
    return [norm_group(memory, dtype, num_threads) for dtype in GRADS]


_Call = tuple[str, str, int, Callable[[], object]]  # name, role, bytes, call


def _bandwidth(memory: Memory, work: Work, num_threads: int) -> Iterator[_Call]:
    streams, traffic_bytes = memory.streams(work), memory.traffic_bytes(work)
    for name, options in UPDATE_VARIANTS.items():
        if options.get("nontemporal") and not has_nontemporal():
            continue
        yield (
            f"loop: {name}",
            BANDWIDTH,
            traffic_bytes,
            partial(update_streams, streams, num_threads=num_threads, **options),
        )
    yield "loop: torch.add_", BANDWIDTH, traffic_bytes, partial(_torch_adds, memory, work)


def _torch_adds(memory: Memory, work: Work) -> None:
    """One add_ a tensor, of 0; the gradient is read by the first one whose elements have its size, or summed."""
    grad = memory.grads[work.grad]
    unread: Tensor | None = _as_integers(grad)
    for stream in memory.streams(work):
        tensor = _as_integers(stream.tensor)
        if stream.tensor is grad:
            continue
        if stream.mode is Mode.WRITE:
            tensor.fill_(0)
        elif unread is not None and tensor.dtype == unread.dtype:
            tensor.add_(unread, alpha=0)
            unread = None
        else:
            tensor.add_(0)
    if unread is not None:
        unread.view(torch.float32).sum()


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)  # bytes by four


def _ours(memory: Memory, work: Work, num_threads: int) -> Iterator[_Call]:
    pieces, scalars = [memory.piece(work)], our_scalars()
    traffic_bytes = memory.traffic_bytes(work)
    if cpu_adam.is_available():
        for level in levels():
            call = partial(cpu_adam.update, pieces, scalars, num_threads=num_threads, level=level)
            yield f"ours: {level}", OURS, traffic_bytes, call
    yield "ours: plain torch", FALLBACK, traffic_bytes, partial(reference.update, pieces, scalars)


def our_scalars() -> AdamScalars:
    """AdamW with unscaling and clipping, as in a step that clips."""
    return adam_scalars(
        step=STEP,
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        inv_scale=2.0**-10,
        clip=0.5,
    )


def _torch_ways(memory: Memory, work: Work) -> Iterator[_Call]:
    """torch's own kernels for the work that they can do; bf16 weights that are cast to fp32 and back have no master.

    Copies that are made afresh in every step cost page faults as well, copies that are kept 8 bytes a parameter.
    """
    if work.moments != "fp32":
        return  # torch's kernels know no other moments
    if work == Work("whole", "fp32"):
        yield "torch: fused", PEER, 28 * memory.numel, partial(_fused, memory, memory.weight, memory.grads["fp32"])
        yield "torch: AdamW(foreach)", PEER, 28 * memory.numel, _foreach(memory).step
        return
    if work.grad != "bf16" or work.layout == "whole":
        return
    weight32, grad32 = memory.temporaries
    if work.layout == "split":

        def cast_fused_cast() -> None:
            weight32.copy_(memory.upper)
            grad32.copy_(memory.grads["bf16"])
            _fused(memory, weight32, grad32)
            memory.upper.copy_(weight32)

        def fresh_copies() -> None:
            weight = memory.upper.float()
            _fused(memory, weight, memory.grads["bf16"].float())
            memory.upper.copy_(weight)

        yield "torch: cast, fused, cast (fresh copies)", PEER, 46 * memory.numel, fresh_copies
        yield "torch: cast, fused, cast (kept copies)", PEER, 46 * memory.numel, cast_fused_cast
    else:

        def fused_and_copy() -> None:
            grad32.copy_(memory.grads["bf16"])
            _fused(memory, memory.weight, grad32)
            memory.half.copy_(memory.weight)

        yield "torch: cast, fused, copy to bf16", PEER, 40 * memory.numel, fused_and_copy


def _fused(memory: Memory, weight: Tensor, grad: Tensor) -> None:
    torch._fused_adamw_(
        [weight],
        [grad],
        [memory.exp_avg],
        [memory.exp_avg_sq],
        [],
        [torch.tensor(float(STEP))],
        lr=LEARNING_RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        eps=EPS,
        amsgrad=False,
        maximize=False,
    )


def _foreach(memory: Memory) -> torch.optim.AdamW:
    parameter = nn.Parameter(memory.weight)
    parameter.grad = memory.grads["fp32"]
    optimizer = torch.optim.AdamW(
        [parameter], lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=True
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(float(STEP)),
        "exp_avg": memory.exp_avg,
        "exp_avg_sq": memory.exp_avg_sq,
    }
    return optimizer


def _into_zeroed(kernel: Callable[[Tensor, Tensor], object], limbs: Tensor, flat: Tensor) -> None:
    limbs.zero_()  # many rounds would overflow them
    kernel(limbs, flat)
