"""`max_prefetch`: the payloads that are fetched before they are asked for. It decides no bit and no memory."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from gemini import ShardedModel, ShardedOptimizer, state_hash
from gemini.placement.next_use import NextUse
from gemini.ranks.communicator import Communicator
from tests.harness import late_copies
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp

BUDGETS: dict[str, int | None] = {"every slot is kept": None, "slots change hands": 9 * 4 * mlp.CHUNK_NUMEL}


@dataclass
class Flights:
    """All-gathers that have begun and have not ended."""

    now: int = 0
    most: int = 0


@contextmanager
def watched() -> Iterator[Flights]:
    """Inside, the all-gathers of every model in this process are counted."""
    flights, start = Flights(), Communicator.start_all_gather

    def counted(*arguments: Any, **options: Any) -> Callable[[], None]:
        finish = start(*arguments, **options)
        flights.now += 1
        flights.most = max(flights.most, flights.now)

        def finished() -> None:
            finish()
            flights.now -= 1

        return finished

    with mock.patch.object(Communicator, "start_all_gather", counted):
        yield flights


def wrap(budget: str, **options: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    policy = "auto" if BUDGETS[budget] is None else "cpu"  # parameters on the host keep no slot
    arguments = {"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", "model_data_memory": BUDGETS[budget], **options}
    arguments.setdefault("tensor_placement_policy", policy)
    model = ShardedModel(mlp.build(), **arguments)
    return model, ShardedOptimizer(model, mlp.adam(model.parameters()))


@on_ranks(2, soak=(3,))
@pytest.mark.parametrize("budget", BUDGETS)
def test_as_many_payloads_are_on_their_way_as_the_user_allows(rank: int, world_size: int, budget: str) -> None:
    found = []
    for most in (0, 1, 2, 4):
        model, optimizer = wrap(budget, max_prefetch=most)
        ledger, in_pools = model.chunk_manager.memory.device.ledger, sum(model.plan.placement.num_slots)
        kept = model.plan.placement.kept
        with watched() as flights:
            trained = mlp.train_while(model, optimizer, rank)
        found.append((trained, ledger.peak_bytes, model.plan.device_bytes))
        ahead = model.observer.counts["prefetch"]
        assert (ahead > 0) == (most > 0)
        assert flights.now == 0
        if most == 0:
            assert flights.most == 1, "what is asked for is waited for"
        elif kept:
            assert flights.most == most
        else:
            assert flights.most == min(most, in_pools - 1), "the operator that runs has a slot"
    assert found.count(found[0]) == len(found)


@on_ranks(1, 2)
def test_payloads_come_from_the_host_before_they_are_asked_for(rank: int, world_size: int) -> None:
    """Nothing is gathered here: every rank holds the parameters whole. Copies are as late as their tickets allow."""
    found, stage = [], {"stage": 1} if world_size > 1 else {}
    for most, are_late in itertools.product((0, 1, 4), (False, True)):
        with late_copies.installed() if are_late else nullcontext():
            model, optimizer = wrap("slots change hands", max_prefetch=most, **stage)
            trained = mlp.train_while(model, optimizer, rank)
            assert (model.observer.counts["prefetch"] > 0) == (most > 0)
            found.append((trained, model.chunk_manager.memory.device.ledger.peak_bytes))
    assert found.count(found[0]) == len(found)


@on_ranks(1, 2)
def test_a_model_that_fetches_nothing_ahead_does_not_look_ahead(rank: int, world_size: int) -> None:
    """A user who does not want it; by default where copies take turns with kernels, and nothing is gathered."""
    for more in ({"max_prefetch": 0}, {"stage": 2}):
        model, optimizer = mlp.sharded("smallest", **more)
        with mock.patch.object(NextUse, "coming", side_effect=AssertionError):
            mlp.train_while(model, optimizer, rank)
        assert model.observer.counts["fetch"] and not model.observer.counts["prefetch"]


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_a_home_that_is_lent_to_a_gradient_is_not_fetched_into_a_slot(fraction: float) -> None:
    """It is the payload of a chunk on the device, which comes back in place when its second micro-batch needs it."""
    hashes = []
    for most in (0, 2):
        model = ShardedModel(
            mlp.build(lambda: mlp.Mlp(6)),
            device="emulated",
            chunk_size=mlp.CHUNK_NUMEL,
            dtype=torch.float16,
            reuse_fp16_shard=True,
            max_prefetch=most,
            tensor_placement_policy="static",
            offload_param_frac=fraction,
            offload_optim_frac=1.0,
        )
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), initial_scale=8.0)
        for step in range(3):
            for micro in range(2):
                optimizer.backward(mlp.loss_of(model, 2 * step + micro, torch.float16))
            optimizer.step()
            optimizer.zero_grad()
        assert (model.observer.counts["prefetch"] > 0) == (most > 0)
        hashes.append(state_hash(model, optimizer))
    assert hashes[0] == hashes[1]
