"""Ranks on which something else than the model refers to the memory of payloads."""

import gc
import random
import threading
import time
from typing import Any

import torch
from torch import Tensor

from gemini import Move, ShardedModel, state_hash
from gemini.runtime import params
from tests.dist.failing import Net, make, train_step


def late_references(rank: int, world_size: int, disturbed: bool) -> tuple[list[tuple[str, int]], str]:
    """A thread on rank 1 keeps references to slots for random milliseconds: (log of moves, hash)."""
    model, optimizer, _ = make()
    moves = _log_moves(model)
    if disturbed and rank == 1:
        communicator = model.chunk_manager.communicator
        gather = communicator.all_gather
        clock = random.Random(0)

        def gather_and_hold(payload: Tensor, *rest: Any) -> None:
            gather(payload, *rest)
            if clock.random() < 0.5:
                threading.Thread(target=_hold, args=([payload[:1]], clock.random() * 0.02)).start()

        communicator.all_gather = gather_and_hold  # type: ignore[method-assign]
    for step in range(6):
        train_step(model, optimizer, rank, step)
    return moves, state_hash(model, optimizer)


def kept_view(rank: int, world_size: int, from_step: int, to_step: int) -> tuple[list[tuple[str, int]], str, int, bool]:
    """Rank 1 keeps a view over several steps: (log of moves, hash, most slots set aside, view's content kept)."""
    params._FREE_WITHIN_S = 0.05
    model, optimizer, net = make(slots=1)
    moves = _log_moves(model)
    pools = model.chunk_manager.params.slots.pools
    assert pools is not None
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(net: Net, x: Tensor) -> None:
        with torch.no_grad():
            kept.append(net.layers[2].weight.view(-1))
        copies.append(kept[0].clone())

    held, intact = 0, True
    for step in range(7):
        if rank == 1 and step == from_step:
            net.at[3] = keep
        if step == to_step:
            intact = all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
            kept.clear()
            copies.clear()
            gc.collect()
        train_step(model, optimizer, rank, step)
        net.at.clear()
        held = max(held, len(pools[0].held))
    intact = intact and all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    result = moves, state_hash(model, optimizer), held, intact
    kept.clear()
    return result


def _log_moves(model: ShardedModel) -> list[tuple[str, int]]:
    moves: list[tuple[str, int]] = []

    def note(move: Move) -> None:
        if move.what in ("fetch", "prefetch", "evict", "release"):
            moves.append((move.what, move.chunk))

    model.observer.listen(note)
    return moves


def _hold(references: list[Tensor], seconds: float) -> None:
    time.sleep(seconds)
    references.clear()
