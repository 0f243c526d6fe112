"""Where `auto` puts what, with how many slots, is close to the best: a search over all placements of small models."""

from dataclasses import replace

import pytest

from benchmarks.optimal_placement import Case, table
from gemini import estimate_memory
from gemini.placement.demand import Kind, Tier
from gemini.placement.policies import AutoPolicy, CpuPolicy
from gemini.placement.policy import link_bytes, slots_for
from gemini.placement.predict import predict
from tests.zoo import mlp


def test_auto_moves_little_more_than_the_best_placement_of_a_budget() -> None:
    """Chains of up to three chunks; `python -m benchmarks.optimal_placement` has the table of up to six."""
    found = [ratio for its in table(max_chunks=3, only="equal chunks").values() for ratio, _, _ in its]
    assert len(found) > 500
    assert min(found) == 1
    assert sum(found) / len(found) < 1.03
    assert sum(ratio == 1 for ratio in found) / len(found) > 0.9
    assert max(found) <= 2


@pytest.mark.soak
def test_auto_moves_little_more_than_the_best_placement_of_every_small_case() -> None:
    found = [ratio for its in table().values() for ratio, _, _ in its]
    assert sum(found) / len(found) < 1.07


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_closed_form_counts_what_the_prediction_counts(dtype: str, world_size: int, micro_batches: int) -> None:
    """But for the first chunk, which no backward reads, where that is not in a slot."""
    case = Case((8,) * 6, (), dtype, world_size, micro_batches)
    plan = case.plan
    demand = plan.demand
    for on_device in ((), (Kind.GRAD,), (Kind.PARAM, Kind.GRAD), (Kind.MASTER, Kind.OPTIM), tuple(Kind)):
        homes = tuple(
            {kind: Tier.DEVICE if kind in on_device else Tier.HOST for kind in chunk.home_bytes}
            for chunk in demand.chunks
        )
        placement = slots_for(demand, homes)
        predicted = predict(replace(plan, placement=placement), micro_batches=micro_batches)
        first = demand.chunks[0].home_bytes[Kind.PARAM] * micro_batches * (homes[0][Kind.PARAM] is Tier.HOST)
        assert 0 <= link_bytes(demand, placement) - sum(predicted.bytes_by_link.values()) <= first


def test_a_whole_chunk_on_the_device_is_worth_more_than_the_parameters_of_several() -> None:
    """Parameters alone travel to the update and back, as often as they would be fetched."""
    demand = Case((8,) * 6, (), "fp32", 1, 1).plan.demand
    half = AutoPolicy().place(demand, None).device_bytes(demand) // 2
    placement = AutoPolicy().place(demand, half)
    for homes in placement.homes:
        assert homes[Kind.PARAM] is homes[Kind.OPTIM], "parameters are where the update is"
    on_host = replace(placement, homes=CpuPolicy().place(demand, None).homes)
    assert link_bytes(demand, placement) < link_bytes(demand, on_host)


def test_a_host_that_is_nearly_full_comes_before_bytes_over_the_link() -> None:
    """Slots hold no state: where they save most bytes, more states rest on the host."""
    free, bound = (
        estimate_memory(mlp.build(), chunk_size=mlp.CHUNK_NUMEL, model_data_memory=29_672, host_memory=most).plan
        for most in (None, 24_576)
    )
    assert bound.host_bytes <= 24_576 < free.host_bytes
    assert sum(bound.predicted.bytes_by_link.values()) >= sum(free.predicted.bytes_by_link.values())
