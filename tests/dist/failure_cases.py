"""Ranks that fail, diverge or dawdle on purpose. Each case is run by every rank of its own short-lived group."""

import os
import random
import signal
import threading
import time
from typing import Any

import torch
from torch import nn

from gemini import DivergenceError, GeminiError, RemoteRankError, ShardedModel, ShardedOptimizer, state_hash
from optim import HybridAdam

WIDTH = 32
CHUNK = WIDTH * WIDTH + 256


class Boom(Exception):
    """The failure that the others must hear of."""


class Net(nn.Module):
    """Eight layers; `at` says what to do before which layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.at: dict[int, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.at:
                layer = self.at[number](self) or layer
            x = torch.tanh(layer(x))
        return x


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise Boom("in backward")


def make(slots: int = 3, seed: int = 0, **options: Any) -> tuple[ShardedModel, ShardedOptimizer, Net]:
    torch.manual_seed(seed)
    net = Net()
    options.setdefault("model_data_memory", (slots + 4) * CHUNK * 4 * 2)
    options.setdefault("tensor_placement_policy", "cpu")
    options.setdefault("rank_timeout", 30)
    model = ShardedModel(net, device="emulated", chunk_size=CHUNK, **options)
    return model, ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2)), net


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train_step(model: ShardedModel, optimizer: ShardedOptimizer, rank: int, step: int) -> None:
    optimizer.backward(model(batch(rank, step)).square().mean())
    optimizer.step()


def one_rank_raises(rank: int, world_size: int, where: str) -> None:
    """Nobody catches it: rank 1 ends, and so must all others."""
    model, optimizer, net = make()
    train_step(model, optimizer, rank, 0)
    if rank == 1:
        if where == "forward":
            net.at[4] = _raise
        elif where == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    output = model(batch(rank, 1))
    if rank == 1 and where == "backward":
        output = FailsInBackward.apply(output)
    optimizer.backward(output.square().mean())
    if rank == 1 and where == "step":
        optimizer.param_groups[0]["lr"] = -1.0
    optimizer.step()
    train_step(model, optimizer, rank, 2)


def _raise(net: Net) -> None:
    raise Boom("forward")


def all_catch_and_go_on(rank: int, world_size: int) -> tuple[str, str, int]:
    """Two failed steps in a row, then training: the hash of a run that never failed."""
    model, optimizer, net = make()
    calm, calm_optimizer, _ = make()
    caught = 0
    for step in range(4):
        train_step(calm, calm_optimizer, rank, step)
        for attempt in range(2 if step == 1 else 0):
            if rank == attempt:
                net.at[3] = _raise
            try:
                train_step(model, optimizer, rank, 90 + attempt)
            except (Boom, RemoteRankError):
                caught += 1
            net.at.clear()
        train_step(model, optimizer, rank, step)
    return state_hash(model, optimizer), state_hash(calm, calm_optimizer), caught


def ranks_diverge(rank: int, world_size: int, how: str) -> tuple[str, bool]:
    """(the error's words, whether weights are as before)."""
    model, optimizer, net = make()
    for step in range(2):
        train_step(model, optimizer, rank, step)
    before = [chunk.homes["param"].flat.clone() for chunk in model.executor.chunks]
    other = rank == 1
    try:
        if how == "forward" and other:
            net.at[3] = lambda n: n.layers[6]
        if how == "touch in forward" and other:
            net.at[3] = lambda n: n.layers[7].weight.sum() and None
        if how == "outside a step":
            if other:
                float(model.get_parameter("layers.5.weight").sum())
            else:
                float(model.get_parameter("layers.2.weight").sum())
        elif how == "evaluation":
            with torch.no_grad():
                if other:
                    net.at[0] = lambda n: n.layers[4]
                model(batch(rank, 2))
        elif how == "skipped backward":
            output = model(batch(rank, 2))
            if other:
                model(batch(rank, 2))
            else:
                optimizer.backward(output.square().mean())
        else:
            train_step(model, optimizer, rank, 2)
        message = ""
    except GeminiError as error:
        message = f"{type(error).__name__}: {error}"
    after = [chunk.homes["param"].flat for chunk in model.executor.chunks]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return message, same


def late_references(rank: int, world_size: int, disturbed: bool) -> tuple[list[tuple[str, int]], str]:
    """A thread on rank 1 keeps references to slots for random milliseconds: the log of moves must not change."""
    model, optimizer, _ = make(slots=3)
    fetcher = model.executor.fetcher
    moves: list[tuple[str, int]] = []
    fetcher._log = lambda what, chunk, source, target: moves.append((what, chunk.index))
    if disturbed and rank == 1:
        gather = fetcher.gather_into
        clock = random.Random(0)

        def gather_and_hold(chunk, payload):  # type: ignore[no-untyped-def]
            gather(chunk, payload)
            if clock.random() < 0.5:
                threading.Thread(target=_hold, args=([payload[:1]], clock.random() * 0.02)).start()

        fetcher.gather_into = gather_and_hold  # type: ignore[method-assign]
    for step in range(6):
        train_step(model, optimizer, rank, step)
    return moves, state_hash(model, optimizer)


def _hold(references: list[torch.Tensor], seconds: float) -> None:
    time.sleep(seconds)
    references.clear()


def different_weights(rank: int, world_size: int) -> str:
    return state_hash(make(seed=rank)[0])


def different_arguments(rank: int, world_size: int, what: str) -> str:
    options: dict[str, Any] = {}
    if what == "stage":
        options["stage"] = 2 + rank
    if what == "budget":
        options["model_data_memory"] = (7 + 4 * rank) * CHUNK * 8
        options["tensor_placement_policy"] = "auto"
    try:
        make(**options)
    except DivergenceError as error:
        return str(error)
    return ""


def one_rank_dawdles(rank: int, world_size: int, seconds: float, rank_timeout: float) -> str:
    model, optimizer, _ = make(rank_timeout=rank_timeout)
    train_step(model, optimizer, rank, 0)
    if rank == 1:
        time.sleep(seconds)
    try:
        train_step(model, optimizer, rank, 1)
    except GeminiError as error:
        return f"{type(error).__name__}: {error}"
    return "done"
