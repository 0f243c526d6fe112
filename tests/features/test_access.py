"""Reading and setting whole parameters, gradients and states, beside a plain model into which the same is reached."""

from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import (
    GatheredParameters,
    GeminiError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
)
from gemini.placement.demand import Demand, Placement, Tier
from gemini.placement.policy import slots_for
from optim import to_bfloat16_half_up
from tests.access import Odd, Pair, value_like
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, assert_same, build, weights_of

WRAPS: list[dict[str, Any]] = [
    {"stage": stage, **place}
    for stage in (0, 1, 2, 3)
    for place in ({"tensor_placement_policy": "cuda"}, {"tensor_placement_policy": "cpu"})
]
WRAPS += [{"shard_strategy": "tensor"}, {"model_data_memory": "smallest"}]
HALF: list[dict[str, Any]] = [
    {"stage": stage, "dtype": torch.bfloat16, "tensor_placement_policy": policy}
    for stage, policy in ((0, "cpu"), (1, "cuda"), (2, "cpu"), (3, "cuda"), (3, "cpu"))
]
everywhere = pytest.mark.parametrize("wrap", WRAPS, ids=str)


@pytest.mark.sampled(4)
@on_ranks(1, 2, 3)
@everywhere
def test_what_is_read_is_whole_on_every_rank(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    pair = Pair(world_size, wrap)
    for step in range(2):
        for parameter, _ in pair.both():
            assert gemini.safe_get_full_grad(parameter) is None
            assert gemini.safe_get_local_grad(parameter) is None
        pair.backward(step)
        for parameter, wanted in pair.both():
            assert torch.equal(gemini.safe_get_full_grad(parameter), wanted.grad)
        pair.step()
        for parameter, wanted in pair.both():
            assert torch.equal(gemini.safe_get_full_fp32_param(parameter), wanted)
            for key in ("exp_avg", "exp_avg_sq"):
                whole = gemini.safe_get_full_optimizer_state(parameter, key)
                assert torch.equal(whole, pair.its.state[wanted][key])
                local = gemini.safe_get_local_optimizer_state(parameter, key)
                assert local.numel() == gemini.safe_get_local_fp32_param(parameter).numel() <= parameter.numel()
                assert set(local.tolist()) <= set(whole.flatten().tolist())
    pair.model.close()


@pytest.mark.sampled(4)
@on_ranks(1, 2, 3)
@everywhere
def test_what_rank_0_sets_counts_and_each_rank_may_set_its_part(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """Rank 0's values count; the others give nonsense."""
    pair = Pair(world_size, wrap)
    pair.backward(0)
    pair.step()
    for seed, (parameter, wanted) in enumerate(pair.both()):
        value = value_like(wanted, seed)
        gemini.safe_set_full_fp32_param(parameter, value if rank == 0 else torch.zeros_like(value))
        gemini.safe_set_full_optimizer_state(parameter, value * (rank == 0), "exp_avg_sq")
        with torch.no_grad():
            wanted.copy_(value)
        pair.its.state[wanted]["exp_avg_sq"].copy_(value)
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    pair.backward(1)
    pair.optimizer.clip_grad_norm_(1e9)
    for seed, (parameter, wanted) in enumerate(pair.both()):
        value = value_like(wanted, 100 + seed)
        gemini.safe_set_full_grad(parameter, value * (rank == 0))
        wanted.grad = value
        assert torch.equal(gemini.safe_get_full_grad(parameter), value)
    pair.step()
    for parameter, wanted in pair.both():  # each rank its own part, all of them the whole
        for key in ("exp_avg", "exp_avg_sq"):
            part = gemini.safe_get_local_optimizer_state(parameter, key)
            gemini.safe_set_local_optimizer_state(parameter, part * 2, key)
            pair.its.state[wanted][key] *= 2
        gemini.safe_set_local_fp32_param(parameter, gemini.safe_get_local_fp32_param(parameter) * 4)
        with torch.no_grad():
            wanted *= 4
    pair.backward(2)
    for parameter, wanted in pair.both():
        gemini.safe_set_local_grad(parameter, gemini.safe_get_local_grad(parameter) * 8)
        wanted.grad *= 8
    pair.step()
    pair.model.close()


@pytest.mark.sampled(4)
@on_ranks(1, 2, 3)
@everywhere
def test_gathered_parameters_are_whole_and_the_modifiers_values_stay(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    pair = Pair(world_size, wrap)
    pair.backward(0)
    pair.step()
    modifier = world_size - 1
    for seed, (parameter, wanted) in enumerate(pair.both()):
        value = value_like(wanted, seed)
        with GatheredParameters(parameter, modifier_rank=modifier):
            assert type(parameter) is nn.Parameter
            assert torch.equal(parameter, wanted)
            with GatheredParameters([parameter]):  # nested, and only to look at
                assert parameter.shape == wanted.shape
            if rank == modifier:
                parameter.data.copy_(value) if seed % 2 else parameter.detach().copy_(value)
        with torch.no_grad():
            wanted.copy_(value)
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    for step in (1, 2):  # it reached the masters, and stays
        pair.backward(step)
        pair.step()
    weight = pair.model.first.weight
    with pytest.raises(UnsupportedError, match=r"without modifier_rank= was left with changes to 'first\.weight'"):
        with GatheredParameters([weight, torch.nn.Parameter(torch.zeros(2))]):
            weight.data[0, 0] = 9.0
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    with pytest.raises(ZeroDivisionError):
        _fails_half_way(weight)
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    pair.backward(3)
    with GatheredParameters(weight), pytest.raises(GeminiError, match=r"step\(\) inside GatheredParameters"):
        pair.optimizer.step()
    with GatheredParameters(weight, modifier_rank=0, enabled=False):
        assert type(weight) is not nn.Parameter
    for bad in (-1, world_size, True, "0"):
        with pytest.raises(ValueError, match=f"one of the {world_size} ranks"):
            GatheredParameters(weight, modifier_rank=bad)  # type: ignore[arg-type]
    pair.model.close()


def _fails_half_way(weight: nn.Parameter) -> None:
    with GatheredParameters(weight, modifier_rank=0):
        weight.data.zero_()
        raise ZeroDivisionError


@on_ranks(1, 2, 3)
def test_masters_keep_what_was_not_changed(rank: int, world_size: int) -> None:
    """bf16: what is set reaches master and parameter, each in its own precision."""
    model = ShardedModel(build(Odd), device="emulated", dtype=torch.bfloat16, chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    weight = model.second.weight
    fine = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    gemini.safe_set_full_fp32_param(weight, fine)
    assert torch.equal(gemini.safe_get_full_fp32_param(weight), fine)
    assert torch.equal(model.state_dict()["second.weight"], gemini.safe_get_full_fp32_param(weight).bfloat16())
    with GatheredParameters(weight, modifier_rank=0):
        if rank == 0:
            weight.data[0] += 1
    after = gemini.safe_get_full_fp32_param(weight)
    assert torch.equal(after[1:], fine[1:]), "masters of what was not changed keep their bits"
    assert not torch.equal(after[0], fine[0])
    number = [p is weight for p in model.parameters()].index(True)
    assert torch.equal(optimizer.state_dict()["masters"][number], after)
    model.close()


@pytest.mark.sampled(4)
@on_ranks_with("wrap", {1: [*WRAPS, *HALF], 2: [*HALF, *WRAPS[::2]], 3: [*HALF, *WRAPS[::2]]})
def test_edits_of_whole_parameters_reach_the_next_forward_the_master_and_the_next_steps(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """Through GatheredParameters and safe_set_full_fp32_param, to the next forward, the master and the next steps."""
    pair = Pair(world_size, wrap)
    pair.backward(0)
    pair.step()
    for seed, (parameter, wanted) in enumerate(pair.both()):
        value = value_like(wanted, seed)
        with GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(value if rank == 0 else torch.zeros_like(value))
        with torch.no_grad():
            wanted.copy_(value)
        assert torch.equal(gemini.safe_get_full_fp32_param(parameter), value)
    for step in (1, 2):
        pair.backward(step)
        pair.step()
    for seed, (parameter, wanted) in enumerate(pair.both()):
        fine = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed))
        gemini.safe_set_full_fp32_param(parameter, fine if rank == 0 else torch.zeros_like(fine))
        with torch.no_grad():
            rounded = to_bfloat16_half_up(fine.reshape(-1)).view(fine.shape) if "dtype" in wrap else fine
            wanted.copy_(rounded)
            if "dtype" in wrap:
                pair.its.state[wanted]["master"].copy_(fine)
    for step in (3, 4):
        pair.backward(step)
        pair.step()
    for parameter, wanted in pair.both():
        master = pair.its.state[wanted]["master"] if "dtype" in wrap else wanted
        assert torch.equal(gemini.safe_get_full_fp32_param(parameter), master)
    pair.model.close()


@pytest.mark.sampled(4)
@on_ranks(1, 2, 3)
@everywhere
def test_a_frozen_parameter_has_no_gradient_and_no_state_to_read(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """A frozen parameter has no gradient and no state to read, whether it was trained before or never."""
    pair = Pair(world_size, wrap)
    pair.backward(0)
    pair.step()
    for trains in (False, True):
        for parameter in pair.model.parameters():
            parameter.requires_grad_(trains)
        for parameter in pair.model.parameters():
            assert gemini.safe_get_full_grad(parameter) is None
            assert gemini.safe_get_local_grad(parameter) is None
            for key in ("exp_avg", "exp_avg_sq"):
                assert (gemini.safe_get_full_optimizer_state(parameter, key) is not None) == trains
                assert (gemini.safe_get_local_optimizer_state(parameter, key) is not None) == trains
    pair.model.close()


def test_what_is_not_there_is_named() -> None:
    model = mlp.wrap("cuda")
    weight = model.layers[0].weight
    with pytest.raises(ValueError, match="no optimizer state 'exp_avg': the model has no ShardedOptimizer"):
        gemini.safe_get_full_optimizer_state(weight, "exp_avg")
    model, optimizer = mlp.sharded("cuda")
    weight = model.layers[0].weight
    with pytest.raises(ValueError, match=r"'layers.0.weight' has no optimizer state 'v': it has \['exp_avg', "):
        gemini.safe_get_local_optimizer_state(weight, "v")
    with pytest.raises(GeminiError, match="has no gradient: no backward"):
        gemini.safe_set_full_grad(weight, torch.zeros(16, 16))
    for call in (gemini.safe_set_full_fp32_param, gemini.safe_set_local_fp32_param):
        for bad in (torch.zeros(3), 1.0):
            with pytest.raises(ValueError, match="must be a tensor of shape"):
                call(weight, bad)  # type: ignore[arg-type]
    for thing in (torch.nn.Parameter(torch.zeros(2)), "weight"):
        with pytest.raises(TypeError, match=r"safe_get_full_grad\(\) takes a parameter of a ShardedModel"):
            gemini.safe_get_full_grad(thing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be parameters or a module, found int"):
        GatheredParameters([3])  # type: ignore[list-item]
    mlp.train_step(model, optimizer)


def test_parameters_that_do_not_fit_together_are_an_error_that_leaves_all_as_it_was() -> None:
    model, optimizer = mlp.sharded("smallest")
    before = mlp.weights_of(model)
    with (
        pytest.raises(gemini.SlotError, match=r"slots of.*Allow [0-9]+ bytes more with model_data_memory= or"),
        GatheredParameters(model),
    ):
        raise AssertionError("unreachable")
    mlp.assert_same(mlp.weights_of(model), before)
    mlp.train_step(model, optimizer)


class FewSlots:
    """A policy of the user's own, which gives the fewest slots that work."""

    name = "few slots"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        return slots_for(demand, tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks))


def test_where_no_budget_was_given_the_advice_is_not_to_raise_it() -> None:
    model = gemini.ShardedModel(
        mlp.build(), device="emulated", chunk_size=mlp.CHUNK_NUMEL, tensor_placement_policy=FewSlots()
    )
    with pytest.raises(gemini.SlotError, match=r"slots of.*num_slots") as raised, GatheredParameters(model):
        raise AssertionError("unreachable")
    assert "model_data_memory" not in str(raised.value)


@on_ranks(2)
def test_a_part_of_the_wrong_shape_on_one_rank_ends_the_others(rank: int, world_size: int) -> None:
    model = ShardedModel(build(), device="emulated", dtype=torch.bfloat16, rank_timeout=20)
    parameter = next(model.parameters())
    part = gemini.safe_get_local_fp32_param(parameter)

    def use() -> None:
        gemini.safe_set_local_fp32_param(parameter, torch.zeros(part.numel() + 1) if rank else part)
        model.state_dict()

    with pytest.raises(ValueError if rank else RemoteRankError, match="this rank's part of"):
        use()
    assert_same(weights_of(model), weights_of(build().bfloat16()))  # ranks have started together again
    model.close()
