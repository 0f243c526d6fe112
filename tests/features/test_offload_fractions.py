"""Fractions of the state on the host, as DeepSpeed's and Colossal-AI's configs ask for them: bytes, and equal bits."""

from typing import Any

import pytest
import torch

from gemini import DivergenceError, Kind, Settings, ShardedModel, ShardedOptimizer, Tier, estimate_memory
from gemini.engine.config import load_config
from gemini.placement.policy import slots_for
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, adam, build, train_while

ZERO_3 = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
CONFIGS: dict[str, tuple[dict[str, Any], float, float]] = {  # of 6 layers: config, state and parameters on the host
    "half of the state": ({"zero_optimization": ZERO_3, "bf16": {"enabled": True}}, 3, 0),
    "half of it, and parameters": (
        {"zero_optimization": {**ZERO_3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}},
        3,
        6,
    ),
    "a third by Colossal-AI's plugin": ({"plugin": {"offload_optim_frac": 1 / 3, "precision": "bf16"}}, 2, 0),
    "all by our own names": (
        {"tensor_placement_policy": "static", "offload_optim_frac": 1, "offload_param_frac": 0.5, "dtype": "bf16"},
        6,
        3,
    ),
}


def train(rank: int, settings: Settings, **of_optimizer: Any) -> tuple[ShardedModel, dict[str, int], Any]:
    """The model, the bytes of its states on the host, and what training gave."""
    model = ShardedModel(build(), settings=settings, chunk_size=CHUNK_NUMEL, device="emulated")
    optimizer = ShardedOptimizer(model, adam(model.parameters()), **of_optimizer)
    on_host = dict(model.chunk_manager.memory.host.ledger.bytes_by_kind)
    return model, on_host, train_while(model, optimizer, rank, steps=4, dtype=torch.bfloat16)


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_puts_its_fraction_of_the_state_onto_the_host(rank: int, world_size: int, name: str) -> None:
    config, states, params = CONFIGS[name]
    _, on_host, found = train(rank, load_config(config).settings())
    numel = CHUNK_NUMEL // world_size
    wanted = {Kind.OPTIM: 8 * states, Kind.MASTER: 2 * states, Kind.GRAD: 2 * states, Kind.PARAM: 2 * params}
    assert {kind: on_host.get(kind, 0) for kind in wanted} == {kind: numel * each for kind, each in wanted.items()}
    assert found == train(rank, Settings(dtype=torch.bfloat16))[2]


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_the_margin_beside_parameters_is_what_optimizer_state_may_take(
    rank: int, world_size: int, ratio: float
) -> None:
    """Half of the layers' masters and moments fit beside the rest: of that room the ratio, in whole chunks."""
    options: dict[str, Any] = {"chunk_size": CHUNK_NUMEL, "dtype": torch.bfloat16}
    state = 10 * CHUNK_NUMEL // world_size  # of a layer: moments, and the other half of its master
    bare = estimate_memory(build(), world_size=world_size, gpu_margin_mem_ratio=0.0, **options)
    assert bare.host[Kind.OPTIM] == LAYERS * 8 * CHUNK_NUMEL // world_size, "without a margin nothing is on the device"
    least = slots_for(bare.plan.demand, bare.plan.placement.homes).device_bytes(bare.plan.demand)
    settings = Settings(dtype=torch.bfloat16, model_data_memory=least + 4 * state)
    model, on_host, found = train(rank, settings, gpu_margin_mem_ratio=ratio)
    on_device = [index for index, its in enumerate(model.plan.placement.homes) if its[Kind.OPTIM] is Tier.DEVICE]
    assert on_device == list(range(int(4 * ratio))), "in order of first use"
    assert on_host.get(Kind.OPTIM, 0) == 8 * (LAYERS - len(on_device)) * CHUNK_NUMEL // world_size
    assert model.plan.policy == f"auto(gpu_margin_mem_ratio={ratio})"
    assert found == train(rank, Settings(dtype=torch.bfloat16))[2]


def test_without_a_bound_any_margin_is_all() -> None:
    for ratio, on_host in ((0.0, True), (0.01, False)):
        placement = estimate_memory(build(), gpu_margin_mem_ratio=ratio, chunk_size=CHUNK_NUMEL).plan.placement
        assert all((its[Kind.OPTIM] is Tier.HOST) == on_host for its in placement.homes)


def test_a_margin_is_for_auto() -> None:
    model = ShardedModel(build(), device="emulated", tensor_placement_policy="cuda")
    with pytest.raises(ValueError, match=r"gpu_margin_mem_ratio=0\.5 belongs to tensor_placement_policy='auto'"):
        ShardedOptimizer(model, adam(model.parameters()), gpu_margin_mem_ratio=0.5)
    assert model.settings.gpu_margin_mem_ratio is None
    ShardedOptimizer(model, adam(model.parameters()))


@on_ranks(2)
def test_ranks_with_other_margins_are_told(rank: int, world_size: int) -> None:
    with pytest.raises(DivergenceError, match=r"gpu_margin_mem_ratio"):
        train(rank, Settings(dtype=torch.bfloat16), gpu_margin_mem_ratio=0.5 * rank)
