"""`offload_states()` between steps: the device is free for another model, and training goes on with the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gemini
from gemini import BudgetError, DivergenceError, GeminiError, ShardedModel, ShardedOptimizer, deepspeed, state_hash
from gemini.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from tests.harness.on_ranks import in_soak, on_ranks
from tests.zoo.mlp import adam, assert_same, build, loss_of, placed, train_while, weights_of

PLACES: dict[str, dict[str, Any]] = {
    "cuda": {},
    "cpu": {"tensor_placement_policy": "cpu"},
    "smallest": {"model_data_memory": "smallest"},
    "bf16": {"dtype": torch.bfloat16},
    "reuse": {"dtype": torch.bfloat16, "reuse_fp16_shard": True},
    "stage-0": {"stage": 0},
    "stage-1": {"stage": 1, "dtype": torch.bfloat16},
}
everywhere = pytest.mark.parametrize(
    "place", ["cuda", "smallest", "bf16", *in_soak("cpu", "reuse", "stage-0", "stage-1")]
)


def trainer(place: str) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(build(), **placed(**PLACES[place]))
    return model, ShardedOptimizer(model, adam(model.parameters()))


def held(model: ShardedModel, tier: int = 0) -> int:
    return model.chunk_manager.memory.tiers[tier].ledger.total_bytes


def train(place: str, rank: int, between: Callable[[int, ShardedModel], None] | None = None) -> tuple[list[float], int]:
    return train_while(*trainer(place), rank, between, 5, PLACES[place].get("dtype"))


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@everywhere
def test_states_leave_the_device_between_steps_and_training_has_the_same_bits(
    rank: int, world_size: int, place: str
) -> None:
    before: list[Any] = []

    def offload(step: int, model: ShardedModel) -> None:
        plan = model.plan
        assert held(model) > 0
        model.offload_states()
        assert held(model) == 0, model.memory_report()
        if step == 1:  # else the next forward brings them back
            model.reload_states()
            model.reload_states()
            assert (model.plan.hash, model.plan.placement) == (plan.hash, plan.placement)
        elif step == 2:  # twice, and without a gradient's memory on the host
            host = held(model, 1)
            model.offload_states()
            assert (held(model), held(model, 1)) == (0, host)
        before.append(plan.placement)

    assert train(place, rank, offload) == train(place, rank)
    assert all(one == before[0] for one in before[:-1]), "a cycle ends where it began"


@on_ranks(1, 2)
def test_one_kind_of_state_leaves_alone(rank: int, world_size: int) -> None:
    kinds = ["param", "grad", "master", "optim"]

    def offload(step: int, model: ShardedModel) -> None:
        kind, ledger = kinds[step % 4], model.chunk_manager.memory.device.ledger
        was = dict(ledger.bytes_by_kind)
        assert was[kind] > 0
        model.offload_states([kind])
        now = ledger.bytes_by_kind
        for name in ("param", "master", "optim"):  # of gradients the fp32 sums go in any case
            assert now[name] == (0 if name == kind else was[name]), name
        assert now["grad"] == 0 or kind != "grad"
        assert now["slots"] == 0 or kind != "param"

    assert train("bf16", rank, offload) == train("bf16", rank)


@on_ranks(1, 2)
def test_another_model_uses_the_device_meanwhile(rank: int, world_size: int) -> None:
    """As in a loop of RLHF: while one model generates and scores, the other's states are on the host."""

    def visit(step: int, model: ShardedModel) -> None:
        model.offload_states()
        other, optimizer = trainer("cuda")
        optimizer.backward(loss_of(other, step))
        optimizer.step()
        assert held(model) == 0 < held(other)
        other.close()

    assert train("cuda", rank, visit) == train("cuda", rank)


@on_ranks(1, 2)
def test_weights_can_be_read_saved_and_used_while_states_are_offloaded(rank: int, world_size: int) -> None:
    wanted: list[dict[str, torch.Tensor]] = []

    def read(step: int, model: ShardedModel) -> None:
        model.offload_states()
        first = next(model.parameters())
        assert torch.equal(first.detach().clone(), model.state_dict()["layers.0.weight"])
        assert model.plan.offloaded
        model.offload_states()
        assert held(model) == 0, "slots that reading took"
        if step == 2:
            with gemini.GatheredParameters(model), torch.no_grad():
                assert first.shape == model.module.layers[0].weight.shape
            assert not model.plan.offloaded
        elif step == 3:
            with torch.no_grad():
                assert torch.equal(loss_of(model), loss_of(model))
            assert not model.plan.offloaded
        elif step == 4:
            wanted.append(weights_of(model))

    assert train("cuda", rank, read) == train("cuda", rank, lambda step, model: wanted.append(weights_of(model)))
    assert_same(wanted[0], wanted[-1])


@on_ranks(1, 2)
def test_a_gradient_that_comes_while_states_are_offloaded_is_used(rank: int, world_size: int) -> None:
    """A layer that is called by itself does not bring anything back: it works where its states are."""
    both = [trainer("bf16") for _ in range(2)]
    for model, optimizer in both:
        optimizer.backward(loss_of(model, rank, torch.bfloat16))
        optimizer.step()
    both[0][0].offload_states()
    for model, optimizer in both:
        x = torch.ones(4, 16, dtype=torch.bfloat16)
        optimizer.backward(model.module.layers[2](x).square().mean())
        optimizer.step()
    assert both[0][0].plan.offloaded
    assert state_hash(*both[0]) == state_hash(*both[1])
    for model, _ in both:
        model.close()


def test_a_graph_from_before_gives_the_same_bits_or_is_refused() -> None:
    hashes = []
    for offloads in (False, True):
        model, optimizer = trainer("smallest")
        loss = loss_of(model)
        if offloads:
            model.offload_states()
        optimizer.backward(loss)
        optimizer.step()
        hashes.append(state_hash(model, optimizer))
    assert hashes[0] == hashes[1]
    model, optimizer = trainer("cuda")
    loss = loss_of(model)
    model.offload_states()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.backward(loss)


@on_ranks(1, 2)
def test_zeros_of_zero_grad_are_there_after_states_were_offloaded(rank: int, world_size: int) -> None:
    """They move parameters that no backward reaches by their moments."""
    hashes = []
    for offloads in (False, True):
        model, optimizer = trainer("cuda")
        for step in range(3):
            optimizer.backward(model.module.layers[0](torch.ones(2, 16)).sum() if step else loss_of(model))
            optimizer.step()
            if offloads:
                model.offload_states()
            optimizer.zero_grad(set_to_none=False)
            if offloads:
                model.reload_states()
        hashes.append(state_hash(model, optimizer))
        model.close()
    assert hashes[0] == hashes[1]


@on_ranks(1, 2)
def test_where_states_cannot_leave_nothing_changes(rank: int, world_size: int) -> None:
    model, optimizer = trainer("cuda")
    plan = model.plan
    optimizer.backward(loss_of(model, rank))
    with pytest.raises(GeminiError, match=r"offload_states\(\) between backward\(\) and step\(\): do it after step"):
        model.offload_states()
    with pytest.raises(ValueError, match="'moments' is no state of a model: name one of param, grad, master, optim"):
        model.offload_states(["moments"])
    optimizer.step()
    with gemini.GatheredParameters(model), pytest.raises(GeminiError, match="inside GatheredParameters"):
        model.offload_states()
    if world_size > 1:
        with pytest.raises(DivergenceError, match="offload"):
            model.offload_states(["optim"] if rank else ["param"])
    assert model.plan is plan
    assert held(model, 1) == 0
    again, its = trainer("cuda")
    its.backward(loss_of(again, rank))
    its.step()
    assert state_hash(model, optimizer) == state_hash(again, its), "the refused call has dropped gradients"
    for each in (model, again):
        each.close()


def test_a_host_without_room_is_told_before_anything_moves() -> None:
    model = ShardedModel(build(), **placed(host_memory="20KiB"))
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    optimizer.backward(loss_of(model))
    optimizer.step()
    before = held(model), state_hash(model, optimizer)
    with pytest.raises(BudgetError, match="host_memory="):
        model.offload_states()
    assert (held(model), state_hash(model, optimizer)) == before
    model.offload_states(["param"])


def test_gradients_that_rest_on_the_host_come_back_within_its_budget() -> None:
    least = ShardedModel(build(), **placed(tensor_placement_policy="cpu")).plan.host_bytes
    model = ShardedModel(build(), **placed(tensor_placement_policy="cpu", host_memory=least))
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    model.offload_states()
    gradients = least - held(model, 1)
    taken = model.chunk_manager.memory.host.allocate(gradients, "another model's")
    with pytest.raises(BudgetError, match=f"states reloaded.* host: {least + gradients} bytes of model data would be"):
        model.reload_states()  # refused as a whole: the message of a home that finds no room tells its own bytes
    model.chunk_manager.memory.host.free(taken, "another model's")
    del taken
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert held(model, 1) == least


@on_ranks(1, 2)
def test_deepspeeds_engine_takes_its_own_names(rank: int, world_size: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine = deepspeed.initialize(model=build(), config=config)[0]
    for step in range(4):
        engine.backward(loss_of(engine, step, torch.bfloat16))
        engine.step()
        by_kind = engine.chunk_manager.memory.device.ledger.bytes_by_kind
        if step == 0:
            engine.offload_states()
            assert held(engine.model) == 0
        elif step == 1:
            engine.offload_states(include={OffloadStateTypeEnum.optim_states, "hp_params"}, pin_memory=False)
            assert by_kind["optim"] == by_kind["master"] == 0 < by_kind["param"]
            engine.reload_states(non_blocking=True)
            assert by_kind["optim"] > 0
        elif step == 2:
            engine.offload_states(device=OffloadDeviceEnum.none)
            assert by_kind["optim"] > 0
            with pytest.raises(gemini.UnsupportedError, match="do not leave for the disk"):
                engine.offload_states(device="nvme")
            with pytest.raises(ValueError, match="'moments', which is no state: name some of optim_states, hp_params"):
                engine.offload_states(include=["moments"])
    engine.close()
