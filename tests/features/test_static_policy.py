"""`StaticPolicy`: fractions of the bytes rest on the host or stay whole on every rank; results are those of "auto"."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini import BudgetError, DivergenceError, Kind, ShardedModel, ShardedOptimizer, StaticPolicy, Tier, state_hash
from tests.harness.on_ranks import on_ranks
from tests.pure.test_placement import demand
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, adam, build, loss_of

FRACTIONS = {
    "nothing": {},
    "half of the state": {"offload_optim_frac": 0.5},
    "all of the state": {"offload_optim_frac": 1.0},
    "all": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    "a third is whole": {"shard_param_frac": 2 / 3, "offload_optim_frac": 0.5},
    "zero 2": {"shard_param_frac": 0.0},
}


def train(policy: Any, rank: int, dtype: torch.dtype | None, **options: Any) -> tuple[ShardedModel, list[float], int]:
    model = ShardedModel(
        build(), device="emulated", chunk_size=CHUNK_NUMEL, dtype=dtype, tensor_placement_policy=policy, **options
    )
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    losses = []
    for step in range(3):
        loss = loss_of(model, 2 * step + rank, dtype)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    found = losses, state_hash(model, optimizer)
    model.close()
    return model, *found


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("fractions", FRACTIONS)
def test_fractions_of_the_bytes_rest_where_the_user_says(rank: int, world_size: int, fractions: str) -> None:
    chosen: dict[str, float] = FRACTIONS[fractions]
    wanted = train("auto", rank, torch.bfloat16)[1:]
    model, *got = train(StaticPolicy(**chosen), rank, torch.bfloat16)
    assert tuple(got) == wanted
    homes = model.plan.placement.homes
    on_host = {kind: [its.get(kind) is Tier.HOST for its in homes] for kind in Kind}
    for kind, fraction in (
        (Kind.PARAM, chosen.get("offload_param_frac", 0)),
        (Kind.OPTIM, chosen.get("offload_optim_frac", 0)),
    ):
        assert sum(on_host[kind]) == round(LAYERS * fraction), "whole chunks of equal bytes"
        assert on_host[kind] == sorted(on_host[kind]), "from the last in order of use on"
    assert on_host[Kind.GRAD] == on_host[Kind.OPTIM]
    whole = round(LAYERS * (1 - chosen.get("shard_param_frac", 1))) if world_size > 1 else 0
    assert model.plan.placement.kept == frozenset(range(whole))


@on_ranks(2)
def test_ranks_with_other_fractions_are_told(rank: int, world_size: int) -> None:
    with pytest.raises(DivergenceError, match=r"tensor_placement_policy=static\(.*offload_optim_frac=0\.5"):
        train(StaticPolicy(offload_optim_frac=0.5 * rank), rank, None)


def test_what_does_not_fit_is_refused_with_the_policys_name() -> None:
    with pytest.raises(
        BudgetError, match=r"static\(shard_param_frac=1\.0, offload_optim_frac=0\.5, .* needs \d+ bytes"
    ):
        train(StaticPolicy(offload_optim_frac=0.5), 0, None, model_data_memory=10_000)


def test_more_budget_is_more_slots() -> None:
    policy = StaticPolicy(offload_param_frac=1.0)
    least = train(policy, 0, None)[0].plan
    more = train(policy, 0, None, model_data_memory=least.device_bytes + 3 * least.demand.slot_bytes[0])[0].plan
    assert (least.placement.num_slots[0], more.placement.num_slots[0]) == (2, 5)


@pytest.mark.parametrize("name", ["shard_param_frac", "offload_optim_frac", "offload_param_frac"])
@pytest.mark.parametrize(
    ("value", "error"), [(-0.1, ValueError), (1.5, ValueError), ("half", TypeError), (True, TypeError)]
)
def test_a_bad_fraction_is_named(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name} must be a number from 0 to 1, found "):
        StaticPolicy(**{name: value})


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=10).filter(any),
    st.booleans(),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_fraction_is_made_up_of_the_fewest_chunks(
    sizes: list[int], sharded: bool, shard: float, optim: float, param: float
) -> None:
    model = demand(sizes, sharded)
    placement = StaticPolicy(shard, optim, param).place(model, None)
    for kind, fraction, whole in ((Kind.OPTIM, optim, frozenset()), (Kind.PARAM, param, placement.kept)):
        left = [(chunk, its) for i, (chunk, its) in enumerate(zip(model.chunks, placement.homes)) if i not in whole]
        moved = [chunk.home_bytes[kind] for chunk, homes in left if homes[kind] is Tier.HOST]
        wanted = fraction * sum(chunk.home_bytes[kind] for chunk, _ in left)
        assert sum(moved) >= wanted - 1e-6 * max(1, wanted)
        assert not moved or sum(moved) - moved[0] < wanted, "one chunk less would not do"
