"""Models that are dropped without `close()`, and wraps that fail: what they leave of descriptors and threads."""

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gemini import BudgetError, DivergenceError, RemoteRankError, ShardedModel, ShardedOptimizer, ZeroInitContext
from gemini.placement.demand import Demand, Placement
from gemini.placement.policies import AutoPolicy
from gemini.ranks import watchdog
from tests.zoo.mlp import CHUNK_NUMEL, adam, assert_same, build, inputs, plain, train_step, weights_of

Held = tuple[int, int]


def held(at_most: Held | None = None) -> Held:
    """(descriptors, threads) of this process. at_most: threads that are about to end are waited for."""
    deadline = time.monotonic() + 2.0
    gc.collect()
    while True:
        now = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if at_most is None or (now[0] <= at_most[0] and now[1] <= at_most[1]) or time.monotonic() > deadline:
            return now
        time.sleep(0.02)


def assert_at_most(most: Held, what: str = "") -> None:
    found = held(most)
    assert found[0] <= most[0] and found[1] <= most[1], f"{what}: {found} descriptors and threads, not {most}"


def make(**options: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    options = {"chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu", "rank_timeout": 20.0, **options}
    model = ShardedModel(build(), device="emulated", **options)
    return model, ShardedOptimizer(model, adam(model.parameters()))


def of_one_model() -> tuple[Held, Held]:
    """(what there is without a model, and with one more)"""
    make()[0].close()
    without = held()
    model = make()[0]
    one = held()
    model.close()
    return without, one


class Boom(Exception):
    """What a script catches."""


def boom(*_: Any) -> None:
    raise Boom("in a forward")


def collect(*_: Any) -> None:
    gc.collect()


# -- models


def made_and_dropped(rank: int, world_size: int, times: int) -> None:
    """One after the other: by `del`, by an exception that leaves the function that has them, or while being built."""
    without, one = of_one_model()

    def trained(number: int) -> None:
        model, optimizer = make()
        train_step(model, optimizer)
        if number % 3 == 1:
            model.module.layers[3].register_forward_pre_hook(boom)
            model(inputs(0))

    for number in range(times):
        if number % 3 == 2:
            with ZeroInitContext():
                build()
        else:
            with suppress(Boom):
                trained(number)
        assert_at_most(one, f"after {number + 1} models")
    make()[0].close()
    assert_at_most(without)


def dropped_on_one_rank_first(rank: int, world_size: int) -> None:
    """The others go on with theirs, and nobody notices; when they drop it too, it ends."""
    without, one = of_one_model()
    early = make(stage=1)[0]
    expected = early(inputs(0)).detach()
    if rank == 0:
        del early
        gc.collect()
    for number in range(3):
        model, optimizer = make()
        reference, its = plain()
        for step in range(2):
            train_step(model, optimizer, step)
            train_step(reference, its, step)
        if world_size == 2:  # the mean of two equal gradients is the gradient
            assert_same(weights_of(model), weights_of(reference))
        if rank:
            assert torch.equal(early(inputs(0)), expected)
        if number % 2:
            model.close()
        del model, optimizer
        gc.collect()
    if rank:
        del early
    assert held(one) > without
    make()[0].close()
    assert_at_most(without)


def collected_in_the_middle_of_anything(rank: int, world_size: int) -> None:
    """In a forward and a backward of another model, at other points on every rank, and in another thread."""
    without, _ = of_one_model()
    over = threading.Event()

    def collect_all_the_time() -> None:
        while not over.wait(0.001 * (rank + 1)):
            gc.collect(1)

    model, optimizer = make()
    layer = model.module.layers[rank]
    layer.register_forward_hook(collect)
    layer.register_full_backward_hook(collect)
    thread = threading.Thread(target=collect_all_the_time)
    thread.start()
    for step in range(4):
        dropped, its = make()
        train_step(dropped, its)
        del dropped, its
        train_step(model, optimizer, step)
    over.set()
    thread.join()
    model.close()
    assert_at_most(without)


def dropped_after_a_failure(rank: int, world_size: int) -> None:
    """Rank 1 never joins a gather that the others have started: what is open there holds up nobody."""
    without, _ = of_one_model()
    for number in range(4):
        model, optimizer = make(stage=3)
        train_step(model, optimizer)
        if rank == 1:
            model.module.layers[number].register_forward_pre_hook(boom)
        with mock.patch.object(watchdog, "POLL_S", 0.05), pytest.raises((Boom, RemoteRankError), match="in a forward"):
            model(inputs(0))
        if number % 2:
            model.close()
        del model, optimizer
        gc.collect()
        started = time.monotonic()
        make()[0].close()
        assert time.monotonic() - started < 10.0
    assert_at_most(without)


def failures_that_every_rank_catches(rank: int, world_size: int) -> None:
    """A model that starts again after each has one process group, not one for every failure."""
    without, one = of_one_model()
    model, optimizer = make()
    train_step(model, optimizer)
    for _ in range(4):
        handle = model.module.layers[3].register_forward_pre_hook(boom)
        with mock.patch.object(watchdog, "POLL_S", 0.05), pytest.raises((Boom, RemoteRankError), match="in a forward"):
            model(inputs(0))
        handle.remove()
        train_step(model, optimizer)
        assert_at_most(one)
    model.close()
    assert_at_most(without)


# -- wraps that fail


class Refuses(AutoPolicy):
    """A policy of the user's that fails on the last rank."""

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        if dist.is_initialized() and dist.get_rank() != dist.get_world_size() - 1:
            return super().place(demand, budget_bytes)
        raise Boom("place()")


def _too_small(rank: int) -> None:
    with pytest.raises(BudgetError, match="needs"):
        make(model_data_memory=0)


def _differing(rank: int) -> None:
    if dist.is_initialized():
        with pytest.raises(DivergenceError, match="chunk_size"):
            make(chunk_size=CHUNK_NUMEL * (1 + rank))


def _on_one_rank(rank: int) -> None:
    with mock.patch.object(watchdog, "POLL_S", 0.05), pytest.raises((Boom, RemoteRankError), match=r"place\(\)"):
        make(tensor_placement_policy=Refuses())


def _interrupted(rank: int) -> None:
    """Ctrl-C on rank 0, in the middle of what ranks agree on."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(watchdog, "POLL_S", 0.05))
        if rank == 0:
            stack.enter_context(mock.patch("gemini.model.wrap.make_chunks", side_effect=KeyboardInterrupt("Ctrl-C")))
        with pytest.raises((KeyboardInterrupt, RemoteRankError), match="Ctrl-C"):
            make()


def _built(rank: int) -> None:
    """The module is as it was; its own ranks part when it is dropped."""
    with ZeroInitContext():
        module = build()
    with pytest.raises(BudgetError, match="needs"):
        ShardedModel(module, device="emulated", model_data_memory=0)
    assert_same(weights_of(module), weights_of(build()))


def wraps_that_fail(rank: int, world_size: int, times: int) -> None:
    without, one = of_one_model()
    wraps: dict[Callable[[int], None], int] = {_too_small: times, _differing: 3, _on_one_rank: 3, _interrupted: 3}
    for fails, number in wraps.items():
        for _ in range(number):
            fails(rank)
        assert_at_most(without, f"{number} times {fails.__name__}")
    for _ in range(3):
        _built(rank)
        assert_at_most(one)
    make()[0].close()
    assert_at_most(without)
