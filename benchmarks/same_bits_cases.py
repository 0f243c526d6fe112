"""What `same_bits` runs: one training at one place, and the trainings that must have the same bits as it.

A case is an arithmetic (ranks, dtype, clipping, micro-batches), which decides the bits, and a place (policy, budget,
chunk size, prefetch), which must not. Each arithmetic has a reference: plain PyTorch on one rank in fp32, elsewhere a
model of which nothing is sharded and nothing moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpt2 import gpt2
from gemini import (
    BudgetError,
    PlacementPolicy,
    ShardedModel,
    ShardedOptimizer,
    StaticPolicy,
    clip_grad_norm_,
    estimate_memory,
    state_hash,
)
from optim import HybridAdam

MAX_NORM = 0.05  # far below the model's norms, so that clipping changes every step
LOSS_SCALE = 2.0**10
VOCABULARY, POSITIONS = 128, 16
SMALL_CHUNK = 2048  # elements

DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
POLICIES: dict[str, str | PlacementPolicy] = {
    "auto": "auto",
    "cpu": "cpu",
    "cuda": "cuda",
    "static, optimizer on the host": StaticPolicy(offload_optim_frac=1.0),
    "static, halves": StaticPolicy(shard_param_frac=0.5, offload_optim_frac=0.5, offload_param_frac=0.5),
}
BUDGETS = ("100 %", "75 %", "50 %", "25 %", "10 %", "minimum")
"""Of model data on the device: fractions of what it holds with everything resident, and the policy's own minimum."""

OPTIONS: dict[str, list[Any]] = {
    "ranks": [1, 2, 4],
    "dtype": list(DTYPES),
    "clips": [False, True],
    "micro": [1, 3],
    "policy": list(POLICIES),
    "budget": list(BUDGETS),
    "chunk": ["searched", "small"],
    "prefetch": [0, 1, 4],
}

TAKING_TURNS = ("clips", "micro", "chunk")
"""Options of which several ranks have some combinations at each place and dtype, and others at the next."""

_TURNS = {2: 2, 4: 1}  # combinations, of eight, by ranks


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What decides the bits of a training."""

    ranks: int
    dtype: str
    clips: bool
    micro: int  # micro-batches a step

    def __str__(self) -> str:
        clips = "clipped" if self.clips else "not clipped"
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.dtype}, {clips}, {self.micro} micro-batches"


@dataclass(frozen=True, kw_only=True)
class Case(Arithmetic):
    """One training. The policy and what follows it must not decide a bit."""

    policy: str
    budget: str
    chunk: str
    prefetch: int  # gathers that may be under way before they are asked for

    @property
    def arithmetic(self) -> Arithmetic:
        """Without the place."""
        return Arithmetic(ranks=self.ranks, dtype=self.dtype, clips=self.clips, micro=self.micro)

    def __str__(self) -> str:
        place = f"{self.policy}, {self.budget}, {self.chunk} chunk size, prefetch {self.prefetch}"
        return f"{super().__str__()}, {place}"

    def has(self, words: Sequence[str]) -> bool:
        """Each word is an option=value of this case."""
        return {*words} <= {f"{name}={value}" for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Bits:
    """What one training has made.

    Args:
        losses: of every rank, step and micro-batch, as hexadecimal floats.
        state: `state_hash` after the last step.
    """

    losses: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class Moved:
    """What one training did, to say that there was something to get wrong.

    Args:
        fetches: payloads brought into slots, those ahead included.
        ahead: those of them that were on their way before they were asked for.
        evictions: payloads that left their slots for others.
        host_bytes: at rest on the host, of one rank.
        num_chunks: of the model.
    """

    fetches: int
    ahead: int
    evictions: int
    host_bytes: int
    num_chunks: int


@dataclass(frozen=True)
class Trained:
    """What one rank says of a case."""

    bits: Bits
    moved: Moved


@dataclass(frozen=True)
class Refused:
    """The policy needs more than the budget: bytes on the device, as the error says."""

    needed_bytes: int


def is_allowed(options: dict[str, Any]) -> bool:
    """Not what there is not: one rank has nothing to gather ahead."""
    return bool(options["ranks"] > 1 or options["prefetch"] == 0)


def matrix() -> list[Case]:
    """The cases, of few ranks first, those of one arithmetic one after the other.

    One rank has all. On several, where a case takes seconds, all dtypes, policies, budgets and prefetches occur
    together, each with a part of `TAKING_TURNS`: any four options' values occur together on 2 ranks, any three's on 4.
    """
    every = (dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values()))
    return [Case(**options) for options in every if is_allowed(options) and _has_turn(options)]


def _has_turn(options: dict[str, Any]) -> bool:
    """A combination and its opposite have their turn at the same places."""
    if options["ranks"] == 1:
        return True
    places = {name: OPTIONS[name].index(value) for name, value in options.items()}
    turn = sum(places[name] for name in ("dtype", "policy", "prefetch")) + 2 * places["budget"]
    bits = sum(places[name] << place for place, name in enumerate(TAKING_TURNS))
    order = (0, 7, 1, 6, 2, 5, 3, 4)
    count = _TURNS[options["ranks"]]
    return order.index(bits) // count == turn % (8 // count)


def build() -> nn.Module:
    """A GPT-2 of 30 thousand parameters, the same on every call."""
    return gpt2(vocab=VOCABULARY, positions=POSITIONS, width=32, layers=2, heads=4)


def tokens(step: int, micro: int, rank: int) -> Tensor:
    """(batch, sequence)"""
    generator = torch.Generator().manual_seed(1 + 10_007 * step + 101 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, POSITIONS), generator=generator)


def train_on(rank: int, world_size: int, case: dict[str, Any], steps: int) -> Trained | Refused:
    """`train`, as ranks are asked for it. Collective."""
    return train(rank, Case(**case), steps)


def reference_on(rank: int, world_size: int, arithmetic: dict[str, Any], steps: int) -> Bits:
    """`reference`, likewise. Collective."""
    return reference(rank, Arithmetic(**arithmetic), steps)


def reference(rank: int, arithmetic: Arithmetic, steps: int) -> Bits:
    """Plain PyTorch where its bits are the same, else nothing is sharded and nothing moves. Collective."""
    if arithmetic.ranks == 1 and arithmetic.dtype == "fp32":
        return _train_plain(arithmetic, steps)
    done = _train(rank, arithmetic, steps, stage=0, tensor_placement_policy="cuda")
    assert done.moved.fetches == 0 and done.moved.host_bytes == 0
    return done.bits


def wrapping(case: Case) -> dict[str, Any]:
    """Arguments of `ShardedModel`, its budget included. Raises BudgetError where the policy needs more."""
    wrap: dict[str, Any] = {"dtype": DTYPES[case.dtype], "device": "emulated", "host_memory": "1GB"}
    wrap["max_prefetch"] = case.prefetch
    if case.chunk == "small":
        wrap["chunk_size"] = SMALL_CHUNK
    estimate = {**wrap, "world_size": case.ranks, "tensor_placement_policy": POLICIES[case.policy]}
    if case.budget == "minimum":
        budget = estimate_memory(build(), **estimate).plan.minimum_bytes
        assert budget is not None
    else:
        whole = estimate_memory(build(), **estimate | {"tensor_placement_policy": "cuda"}).device_bytes
        budget = whole * int(case.budget.removesuffix(" %")) // 100
        estimate_memory(build(), **estimate, model_data_memory=budget)
    return wrap | {"tensor_placement_policy": POLICIES[case.policy], "model_data_memory": budget}


def train(rank: int, case: Case, steps: int) -> Trained | Refused:
    """One case, at its place. Collective. Raises what training raises, and AssertionError for an unasked prefetch."""
    try:
        wrap = wrapping(case)
    except BudgetError as refused:
        if refused.needed_bytes is None or refused.tier != "device":
            raise
        return Refused(refused.needed_bytes)
    done = _train(rank, case, steps, **wrap)
    assert case.prefetch or not done.moved.ahead, f"{case}: {done.moved.ahead} payloads were fetched ahead"
    return done


def _train(rank: int, how: Arithmetic, steps: int, **wrap: Any) -> Trained:
    model = ShardedModel(build(), **{"device": "emulated", "dtype": DTYPES[how.dtype], "rank_timeout": 120, **wrap})
    optimizer = ShardedOptimizer(
        model, _adam(model), clip_grad_norm=MAX_NORM if how.clips else None, initial_scale=LOSS_SCALE
    )
    losses = []
    for step in range(steps):
        for micro in range(how.micro):
            loss = _loss(model, step, micro, rank)
            optimizer.backward(loss / how.micro)
            losses.append(float(loss.detach()).hex())
        optimizer.step()
        optimizer.zero_grad()
    counts = model.observer.counts
    moved = Moved(
        counts["fetch"] + counts["prefetch"],
        counts["prefetch"],
        counts["evict"],
        model.plan.host_bytes,
        len(model.plan.packing.chunks),
    )
    bits = Bits(tuple(losses), state_hash(model, optimizer))
    model.close()
    return Trained(bits, moved)


def _train_plain(how: Arithmetic, steps: int) -> Bits:
    model = build()
    optimizer = _adam(model)
    losses = []
    for step in range(steps):
        for micro in range(how.micro):
            loss = _loss(model, step, micro, 0)
            (loss / how.micro).backward()
            losses.append(float(loss.detach()).hex())
        if how.clips:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return Bits(tuple(losses), state_hash(model, optimizer))


def _adam(model: nn.Module) -> HybridAdam:
    return HybridAdam(model.parameters(), lr=1e-3, weight_decay=0.01)


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    ids = tokens(step, micro, rank)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss
