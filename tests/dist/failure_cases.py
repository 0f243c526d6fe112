"""Ranks that fail or dawdle on purpose. Each case is run by every rank, mostly of a short-lived group."""

import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import GeminiError, RemoteRankError, ShardedModel, ShardedOptimizer, state_hash
from tests.dist.failing import Boom, InBackward, Net, batch, boom, impatient, make, train_step

# -- recovery


def all_catch_and_go_on(rank: int, world_size: int, stage: int) -> list[Any]:
    """Failures of every kind, several in a row, between good steps.

    (hash, hash of a run that never failed, caught, norm of a step after a backward that failed).
    """
    impatient()
    model, optimizer, net = make(stage=stage)
    calm, calm_optimizer, _ = make(stage=stage)
    failures = [["forward", "forward"], ["backward"], ["plain backward", "backward"], ["step", "backward after a step"]]
    caught = []
    for step, kinds in enumerate(failures):
        train_step(calm, calm_optimizer, rank, step)
        for number, kind in enumerate(kinds):
            try:
                _failing_step(model, optimizer, net, rank, kind, who=number % world_size)
                caught.append(f"{kind}: nothing")
            except (Boom, GeminiError, ValueError) as error:
                caught.append(f"{type(error).__name__}: {error}")
            net.at.clear()
            optimizer.param_groups[0]["lr"] = 1e-2
            if kind == "backward":  # not only a forward starts anew
                model.state_dict()
        train_step(model, optimizer, rank, step)
    norm = -1.0
    try:
        net.at[7] = lambda net, x: InBackward.apply(x, boom) if rank == 1 else None
        optimizer.backward(model(batch(rank, 7)).square().mean())
    except (Boom, RemoteRankError):
        net.at.clear()
        with pytest.warns(UserWarning, match="the gradients since the last step are incomplete and were dropped"):
            optimizer.step()
        assert optimizer.last_step is not None
        norm = optimizer.last_step.grad_norm
    return [state_hash(model, optimizer), state_hash(calm, calm_optimizer), caught, norm]


def _failing_step(model: ShardedModel, optimizer: ShardedOptimizer, net: Net, rank: int, kind: str, who: int) -> None:
    if rank == who and kind == "forward":
        net.at[3] = boom
    if rank == who and kind == "step":
        optimizer.param_groups[0]["lr"] = -1.0
    if rank == who and "backward" in kind:
        net.at[4] = lambda net, x: InBackward.apply(x, boom)
    if kind == "backward after a step":  # gradients of an earlier micro-batch are discarded with it
        net_at, net.at = net.at, {}
        optimizer.backward(model(batch(rank, 50)).square().mean())
        optimizer.clip_grad_norm_(1e-3)
        net.at = net_at
    loss = model(batch(rank, 60)).square().mean()
    if kind == "plain backward":
        try:
            loss.backward()
        except Boom:  # nothing of ours saw it: the others hear of it when this rank goes on
            model(batch(rank, 61))
            raise
    else:
        optimizer.backward(loss)
    optimizer.step()


def an_interrupt_that_all_catch(rank: int, world_size: int, where: str) -> tuple[list[str], int, int]:
    """SIGINT on rank 1 only, inside a layer's forward or its backward: (caught, hash, hash of a run without it)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(*_: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    try:
        model, optimizer, net = make(rank_timeout=60)
        caught = []
        for step in range(2):
            train_step(model, optimizer, rank, step)
            net.at[3] = interrupt if where == "forward" else lambda net, x: InBackward.apply(x, interrupt)
            try:
                (model.module if step else model)(batch(rank, 9)).square().mean().backward()
                caught.append("nothing")
            except (KeyboardInterrupt, RemoteRankError) as error:
                caught.append(f"{type(error).__name__}: {error}")
            net.at.clear()
        train_step(model, optimizer, rank, 2)
        calm, its, _ = make()
        for step in range(3):
            train_step(calm, its, rank, step)
        return caught, state_hash(model, optimizer), state_hash(calm, its)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the ranks are started


def a_torn_step(rank: int, world_size: int, deferred: bool) -> tuple[str, list[str]]:
    """An update that fails half way, on one rank: (the first error, what the next steps say)."""
    impatient()
    model, optimizer, _ = make(deferred_update=deferred)
    train_step(model, optimizer, rank, 0)
    model.chunk_manager.memory.work.join()
    if rank == 1:
        updates = optimizer._optimizer_step._updates
        prepare = updates._prepare
        updates._prepare = lambda update: boom() if update.state.chunk.index == 4 else prepare(update)  # type: ignore[method-assign]
    if deferred:
        optimizer.backward(model(batch(rank, 9)).square().mean())
        optimizer.step()  # a thread fails after it
    said = []
    for step in range(1, 4):
        try:
            train_step(model, optimizer, rank, step)
            said.append("nothing")
        except (Boom, GeminiError) as error:
            said.append(f"{type(error).__name__}: {error}")
    model.close()
    return said[0], said[1:]


def a_failure_that_only_one_rank_catches(rank: int, world_size: int) -> None:
    """Rank 1 goes on after its own failure; rank 0 ends."""
    impatient()
    model, optimizer, net = make(rank_timeout=60)
    train_step(model, optimizer, rank, 0)
    if rank == 1:
        net.at[3] = boom
        try:
            train_step(model, optimizer, rank, 1)
        except Boom:
            net.at.clear()
    train_step(model, optimizer, rank, 1)


class ReadsWeight(torch.utils.data.Dataset[Tensor]):
    """Asks the model itself for a weight, in whatever process it is used."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.net.layers[6].weight.sum().detach()


def a_forked_worker_reads_a_weight(rank: int, world_size: int) -> tuple[str, bool]:
    """(what the loader raises, training goes on as if there were no loader)."""
    model, optimizer, net = make(rank_timeout=60)
    train_step(model, optimizer, rank, 0)
    loader = torch.utils.data.DataLoader(ReadsWeight(net), num_workers=1, multiprocessing_context="fork")
    try:
        said = f"nothing: {list(loader)}"
    except Exception as error:
        said = str(error)
    train_step(model, optimizer, rank, 1)
    calm, its, _ = make()
    for step in range(2):
        train_step(calm, its, rank, step)
    return said, state_hash(model, optimizer) == state_hash(calm, its)


# -- time


def one_rank_dawdles(rank: int, world_size: int, seconds: float, rank_timeout: float) -> str:
    impatient()
    model, optimizer, _ = make(rank_timeout=rank_timeout)
    train_step(model, optimizer, rank, 0)
    if rank == 1:
        time.sleep(seconds)
    try:
        train_step(model, optimizer, rank, 1)
    except GeminiError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def a_forward_that_all_catch_drops_gradients(rank: int, world_size: int, stage: int) -> None:
    """Gradients of a backward before it are dropped on all ranks alike, with a warning; training goes on."""
    impatient()
    model, optimizer, net = make(stage=stage)
    train_step(model, optimizer, rank, 0)
    before = state_hash(model, optimizer)
    optimizer.backward(model(batch(rank, 1)).square().mean())
    net.at[1] = boom
    with suppress(Boom):
        model(batch(rank, 2))
    net.at.clear()
    with pytest.warns(UserWarning, match="ended with an exception: the gradients since the last step .* were dropped"):
        optimizer.step()
    assert state_hash(model, optimizer) == before
    train_step(model, optimizer, rank, 3)
    assert state_hash(model, optimizer) != before
    model.close()


# -- ranks that are killed


def one_is_killed_in_a_step(rank: int, world_size: int) -> None:
    model, optimizer, _ = make()
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


def one_is_killed_before_a_second_model(rank: int, world_size: int) -> None:
    make()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    make()
