"""Optimizer state, masters and memory of what is frozen: kept, discarded on request, saved and loaded."""

from typing import Any

import pytest
import torch
from torch import nn

from gemini import GeminiError, ShardedModel, ShardedOptimizer, state_hash
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, assert_same
from tests.zoo.parts import Pair, Trunk, at_some_places, everywhere


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@at_some_places
def test_state_that_is_discarded_starts_afresh(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """State that is given up on request starts afresh, as when it is popped from a plain optimizer's state."""
    pair = Pair(rank, world_size, wrap, mlp.Mlp)
    pair.steps(0, 1)
    pair.flag(False, "layers.1.", "layers.2.weight", "layers.5.")
    pair.steps(2)
    pair.discard("layers.1.", "layers.2.weight")
    pair.steps(3)
    pair.flag(True, "layers.1.", "layers.2.weight")
    pair.steps(4)
    pair.flag(False, "layers.3.")
    pair.discard()
    pair.flag(True, "layers.")
    pair.steps(5)
    state = pair.optimizer.state_dict()["state"]
    assert [int(state[2 * layer]["step"]) for layer in range(LAYERS)] == [6, 2, 2, 1, 6, 1]
    before = state_hash(pair.model, pair.optimizer)
    pair.flag(False, "layers.3.")
    trained, frozen = (pair.both(name)[0] for name in ("layers.2.weight", "layers.3.weight"))
    for bad, complaint in (
        ([frozen, trained], "'layers.2.weight', which is trained: freeze it first"),
        ([nn.Parameter(torch.zeros(3))], r"found Parameter of shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=complaint):
            pair.optimizer.discard_state(bad)
    pair.flag(True, "layers.3.")
    pair.backward(6)
    pair.flag(False, "layers.3.")
    with pytest.raises(GeminiError, match=r"discard_state\(\) between backward\(\) and step\(\)"):
        pair.optimizer.discard_state()
    pair.flag(True, "layers.3.")
    pair.zero_grad()
    assert state_hash(pair.model, pair.optimizer) == before
    pair.steps(7)
    pair.model.close()


@pytest.mark.sampled(4)
@everywhere
def test_a_state_saved_while_parts_were_frozen_is_loaded_where_they_are_frozen_from_the_start(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """A state dict that was saved while something was frozen, loaded where that was frozen before wrapping."""
    pair = Pair(rank, world_size, wrap, mlp.Mlp)
    pair.steps(0, 1)
    pair.flag(False, "layers.1.", "layers.4.weight")
    pair.steps(2)
    saved = pair.model.state_dict(), pair.optimizer.state_dict()
    masters = {number: master.clone() for number, master in saved[1]["masters"].items()}
    wanted = state_hash(pair.model, pair.optimizer)
    pair.model.close()

    class Frozen(mlp.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].requires_grad_(False)
            self.layers[4].weight.requires_grad_(False)

    again = Pair(rank, world_size, wrap, Frozen)
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    assert state_hash(again.model, again.optimizer) == wanted
    assert_same(again.optimizer.state_dict()["masters"], masters)
    again.plain, again.its = pair.plain, pair.its
    again.flag(True, "layers.")
    again.steps(3, 4)
    again.model.close()


@pytest.mark.sampled(4)
@everywhere
def test_what_is_frozen_holds_only_its_weights_once_its_state_is_discarded(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """Frozen chunks hold parameters only once their state is given up; each layer is a chunk: bytes count layers."""
    pair = Pair(rank, world_size, wrap | {"chunk_size": CHUNK_NUMEL}, mlp.Mlp)
    kinds = ["grad", "optim", *(["master"] if pair.dtype else [])]

    def bytes_now() -> dict[str, int]:
        return {kind: pair.held(kind) for kind in (*kinds, "param")}

    pair.steps(0)
    full = bytes_now()
    for step, count in enumerate((4, 1, 0, 3, 6), start=1):  # trained layers, the last ones
        pair.flag(False, *(f"layers.{n}." for n in range(LAYERS - count)))
        pair.flag(True, *(f"layers.{n}." for n in range(LAYERS - count, LAYERS)))
        if count:
            pair.steps(step)
        else:
            pair.model(mlp.inputs(0, pair.dtype))
        now = bytes_now()
        assert now["param"] == full["param"] and now["grad"] * LAYERS == full["grad"] * count
        if step == 1:
            assert now == {**full, "grad": now["grad"]}, "frozen layers keep their state"
        pair.discard()
        now = bytes_now()
        assert {kind: now[kind] * LAYERS for kind in kinds} == {kind: full[kind] * count for kind in kinds}
        budget = pair.model.plan.budget_bytes
        assert budget is None or pair.model.chunk_manager.memory.tiers[0].ledger.peak_bytes <= budget
    pair.model.close()


def test_what_is_loaded_right_after_unfreezing_reaches_masters_and_state() -> None:
    """As one resumes: wrapped frozen, unfrozen, loaded."""
    weights = {name: torch.randn_like(value) for name, value in mlp.Mlp().state_dict().items()}
    states = []
    for frozen_at_first in (True, False):
        model = ShardedModel(mlp.build(Trunk if frozen_at_first else mlp.Mlp), dtype=torch.bfloat16)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model.load_state_dict(weights)
        states.append(optimizer.state_dict())
    assert all(torch.equal(master, states[1]["masters"][key]) for key, master in states[0]["masters"].items())
    assert states[0]["masters"].keys() == states[1]["masters"].keys()
    optimizer.load_state_dict(states[0])


def test_state_of_what_is_frozen_rests_on_the_host_where_the_device_is_full() -> None:
    """Two halves in turns, under a budget that lacks a byte: the state that no step reads moves out and in again."""
    everything = {"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", "tensor_placement_policy": "auto"}
    unbounded = ShardedModel(mlp.build(), **everything)
    gradient_bytes = 4 * mlp.CHUNK_NUMEL
    budget = unbounded.plan.placement.device_bytes(unbounded.plan.demand) - 3 * gradient_bytes - 1
    model, plain = ShardedModel(mlp.build(), model_data_memory=budget, **everything), mlp.build()
    optimizers = [ShardedOptimizer(model, mlp.adam(model.parameters())), mlp.adam(plain.parameters())]
    for step in range(6):
        for module, optimizer in zip((model, plain), optimizers):
            for number, layer in enumerate(module.layers):
                layer.requires_grad_((number < 3) == (step % 2 == 0))
            mlp.train_step(module, optimizer, step)
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
    device, host = model.chunk_manager.memory.tiers
    assert device.ledger.peak_bytes <= budget
    placed = zip(model.plan.demand.chunks, model.plan.placement.homes, strict=True)
    tiers = {(chunk.is_frozen, homes["optim"]) for chunk, homes in placed}
    assert tiers == {(True, "host"), (False, "device")}, tiers
    assert host.ledger.bytes_by_kind["optim"] == device.ledger.bytes_by_kind["optim"] > 0
