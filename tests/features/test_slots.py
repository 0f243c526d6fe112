"""Kept slots, in which parameter homes lie, and payloads that are fetched before they are used, on several ranks."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gemini import RemoteRankError, ShardedModel, ShardedOptimizer, SlotError
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import Region
from gemini.placement.demand import Tier
from gemini.placement.policy import slots_for
from gemini.runtime.chunk import Chunk
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, assert_same, build, loss_of, plain, train_step, weights_of

PAYLOAD_BYTES = 4 * CHUNK_NUMEL


def sharded(budget: str | int | None, **arguments: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    """budget: None, "smallest", "one kept", or bytes."""
    arguments = {"chunk_size": CHUNK_NUMEL, **arguments}
    if budget == "smallest":
        budget = mlp.smallest_budget(**arguments)
    elif budget == "one kept":  # all homes and two slots fit, and what a payload has beside its home
        budget = _all_at_home() + PAYLOAD_BYTES // 2
    model = ShardedModel(build(), device="emulated", model_data_memory=budget, **arguments)
    return model, ShardedOptimizer(model, mlp.adam(model.parameters()))


def _all_at_home() -> int:
    demand = sharded(None)[0].plan.demand
    homes = tuple(dict.fromkeys(chunk.home_bytes, Tier.DEVICE) for chunk in demand.chunks)
    return slots_for(demand, homes).device_bytes(demand)


def everything_kept() -> int:
    """The bytes of a model whose chunks all keep their slots."""
    model, _ = sharded(None)
    assert model.plan.placement.kept == frozenset(range(LAYERS))
    return model.plan.placement.device_bytes(model.plan.demand)


@on_ranks(2, 3)
def test_a_kept_payload_and_its_home_are_one_memory(rank: int, world_size: int) -> None:
    model, optimizer = sharded(None)
    for step in range(3):
        before = model.chunk_manager.communicator.collectives.calls["all_gather"]
        train_step(model, optimizer, step)
    kinds = model.chunk_manager.memory.tiers[0].ledger.peak_by_kind
    payloads = [chunk.payload_bytes for chunk in model.chunk_manager.chunks]
    assert kinds["param"] * world_size == sum(payloads)
    room = sum(payloads) + max(payloads)
    assert kinds["slots"] + kinds["param"] <= room, "no home beside a payload, but while one is made"
    num_gathers = model.chunk_manager.communicator.collectives.calls["all_gather"] - before
    assert num_gathers == len(payloads), "nothing leaves between forward and backward"


@on_ranks(1, 2)
def test_a_fetch_and_a_reduction_make_no_regions_that_were_there_in_the_last_step(rank: int, world_size: int) -> None:
    model, optimizer = sharded(None, tensor_placement_policy="cpu")
    made, make = [], Region.__init__
    for step in range(4):
        with mock.patch.object(Region, "__init__", lambda *its: make(*its) or made.append(its[0])):
            loss_of(model, step).backward()
            made = made if step == 3 else []
        optimizer.step()
        optimizer.zero_grad()
    counts = model.chunk_manager.observer.counts
    assert counts["fetch"] + counts["prefetch"] > 2 * LAYERS and counts["reduce"] == 4 * LAYERS
    assert not made


@pytest.mark.sampled(2)
@on_ranks(2)
@pytest.mark.parametrize(
    ("budget", "kept", "slots", "most"),
    [("smallest", 0, 2, 1), ("one kept", 1, 2, 4), (None, LAYERS, 0, 1), (None, LAYERS, 0, 4)],
    ids=str,
)
def test_what_was_fetched_ahead_in_vain_changes_nothing(
    rank: int, world_size: int, budget: str | None, kept: int, slots: int, most: int
) -> None:
    """Steps that are not as the last one, while something is on its way: the bits are those of one plain process.

    All ranks see the same data, so the mean of their gradients is each one's own.
    """
    model, optimizer = sharded(budget, max_prefetch=most)
    reference, its = plain()
    ahead = []
    for step in range(8):
        both: tuple[tuple[Any, Any, Any], ...] = ((model, model.module, optimizer), (reference, reference, its))
        for which, module, steps in both:
            layers = module.layers
            if step == 3:  # a forward that skips what is on its way
                module.layers = torch.nn.ModuleList([*layers[:2], *layers[3:]])
            loss = loss_of(which, step)
            module.layers = layers
            if step == 4:  # an evaluation between forward and backward
                with torch.no_grad():
                    loss_of(which, step)
            loss.backward()
            if step == 5:  # a forward that ends early, before the step: what it fetched ahead will be stale
                module.layers = layers[:2]
                loss_of(which, step)
                module.layers = layers
            steps.step()
            steps.zero_grad()
        if step in (5, 6):
            weight = model.layers[2].weight * 1
            assert torch.equal(weight, reference.layers[2].weight)
        ahead.append(model.observer.counts["prefetch"])
    assert_same(weights_of(model), weights_of(reference))
    placement = model.plan.placement
    assert (len(placement.kept), placement.num_slots[0]) == (kept, slots)
    assert ahead[-1] > ahead[-2], "the last step was as the one before: its gathers started early"


def a_view_outlives_a_step(rank: int, world_size: int, spare_bytes: int | None) -> str:
    """Rank 0 keeps a view that it took inside an operator over a step. What step() says, "" if it went on."""
    model, optimizer = sharded(None if spare_bytes is None else everything_kept() + spare_bytes)
    reference, its = plain()
    for step in range(2):
        train_step(model, optimizer, step)
        train_step(reference, its, step)
    before = weights_of(model)
    bytes_before = model.chunk_manager.memory.tiers[0].ledger.total_bytes
    views: list[Tensor] = []
    if rank == 0:
        layer = model.layers[2]
        handle = layer.register_forward_hook(lambda module, *_: views.append(module.weight.detach()))
    loss_of(model, 2).backward()
    if rank == 0:
        handle.remove()
    said = ""
    try:
        optimizer.step()
    except (SlotError, RemoteRankError) as error:
        said = f"{type(error).__name__}: {error}"
        views.clear()
        assert_same(weights_of(model), before)  # nothing was changed, and the ranks go on together
        train_step(model, optimizer, 2)
    optimizer.zero_grad()
    for view in views:
        assert torch.equal(view, before["layers.2.weight"]), "the view has its memory alone"
        assert model.chunk_manager.memory.tiers[0].ledger.total_bytes == bytes_before + PAYLOAD_BYTES
    train_step(reference, its, 2)
    views.clear()
    view = None  # type: ignore[assignment]
    for step in range(3, 5):
        train_step(model, optimizer, step)
        train_step(reference, its, step)
    assert_same(weights_of(model), weights_of(reference))
    assert model.chunk_manager.memory.tiers[0].ledger.total_bytes == bytes_before, "what the view had is given back"
    return said


@on_ranks(2)
def test_a_view_that_outlives_a_step_keeps_the_old_weights(rank: int, world_size: int) -> None:
    assert a_view_outlives_a_step(rank, world_size, None) == ""


@on_ranks(2)
def test_a_kept_view_without_room_beside_it_stops_the_step_before_anything_changes(rank: int, world_size: int) -> None:
    said = gathered(a_view_outlives_a_step(rank, world_size, 0))
    assert "layers.2.weight" in said[0]
    assert "must leave its slot for an update, but a view of one of its parameters is still alive" in said[0]
    assert "model_data_memory=" in said[0]
    assert said[0].startswith("SlotError") and said[1].startswith("RemoteRankError")
    assert "must leave its slot" in said[1]


@on_ranks(2)
def test_a_closed_model_gives_its_process_group_back(rank: int, world_size: int) -> None:
    counts = []
    for _ in range(4):
        model, optimizer = sharded(None)
        for step in range(3):
            train_step(model, optimizer, step)
        model.close()
        model.close()
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    assert counts[-1] <= counts[0], "threads"


@on_ranks(2)
def test_a_slot_that_is_replaced_leaves_its_memory_before_there_is_another(rank: int, world_size: int) -> None:
    model, _ = sharded(everything_kept())
    chunk, tier = model.chunk_manager.chunks[1], model.chunk_manager.memory.device
    assert chunk.own_slot is not None and chunk.own_slot.region is not None
    old, keep_slot, found = StorageWeakRef(chunk.own_slot.region.flat.untyped_storage()), type(chunk).keep_slot, []

    def look(self: Chunk, tier: MemoryTier) -> None:
        found.append(old.expired())
        keep_slot(self, tier)

    with mock.patch.object(type(chunk), "keep_slot", look):
        chunk.renew_own_slot(tier)
    assert found == [True]
    assert_same(weights_of(model), weights_of(build()))
    model.close()
