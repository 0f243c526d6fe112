"""Without `chunk_size=` no budget is refused that some chunk size could do with, and the least one trains.

The least budget of any chunk size is found by trying them all, one after the other.
"""

import contextlib
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from gemini import (
    BudgetError,
    Settings,
    ShardedModel,
    ShardedOptimizer,
    SlotError,
    estimate_memory,
    plan_model,
    specs_of,
)
from gemini.placement.demand import ModelSpec
from gemini.placement.plan import Plan
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.reference import Recipe, train_plain
from tests.harness.runs import assert_equal_runs, wanted_on
from tests.harness.sharded import train_sharded
from tests.zoo.mlp import CHUNK_NUMEL, build, layer_of, loss_of, minimum_bytes, weight
from tests.zoo.models import MODELS, ModelCase

STEP_BYTES = 512  # parameters start on 256 elements, of 2 bytes at least: sizes between make the same chunks
POLICIES = ["auto", "cpu", "cuda"]
SAMPLE = ["llama", "vit", "odd_shapes", "experts", "mixed_dtypes", "zero_size"]
TRAINED = ["llama_checkpoint", "vit", "borrowed", "lstm", "odd_shapes"]
OFTEN_REDUCED = "checkpoint_shared_reentrant"  # its gradients come in pieces: their sum depends on the chunk size


def settings_of(case: ModelCase, dtype: torch.dtype | None, **options: Any) -> Settings:
    dtype = None if "own_dtypes" in case.tags else dtype
    return Settings(device="emulated", host_memory="4GB", dtype=dtype, **options)


def chunk_sizes(spec: ModelSpec, world_size: int) -> list[int]:
    """In elements: the ones that a user may give, but for those that make the same chunks as another."""
    sizes = [weight.dtype.itemsize for weight in spec.weights]
    itemsize = max(sorted(set(sizes)), key=sizes.count)  # in which chunk_size= counts
    quantum = 256 * world_size * max(sizes)
    in_all = sum(-(-weight.numel * weight.dtype.itemsize // quantum) * quantum for weight in spec.weights)
    return [1, *range(STEP_BYTES // itemsize, (in_all + quantum) // itemsize + 1, STEP_BYTES // itemsize)]


def least_of_all_sizes(spec: ModelSpec, settings: Settings, world_size: int) -> int:
    """Of model data on the device, as the refusals say of each chunk size."""
    found = []
    for size in chunk_sizes(spec, world_size):
        given = dataclasses.replace(settings, chunk_size=size)
        found.append(plan_model(spec, given, world_size).packed_minimum_bytes)
    return min(each for each in found if each is not None)


def check_minimum(case: ModelCase, world_size: int, policy: str, dtype: torch.dtype | None) -> None:
    settings = settings_of(case, dtype, tensor_placement_policy=policy)
    spec = specs_of(case.build(torch.float32), settings, world_size)
    wanted = least_of_all_sizes(spec, settings, world_size)
    at_least = plan_model(spec, dataclasses.replace(settings, model_data_memory=wanted), world_size)
    assert at_least.device_bytes <= wanted == at_least.minimum_bytes, (case.name, policy, dtype)
    if wanted:
        with pytest.raises(BudgetError, match=f"needs {wanted} bytes of model data") as refused:
            plan_model(spec, dataclasses.replace(settings, model_data_memory=wanted - 1), world_size)
        assert refused.value.needed_bytes == wanted, (case.name, policy, dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", range(len(SAMPLE)), ids=SAMPLE)
def test_the_least_budget_is_the_least_of_every_chunk_size(place: int) -> None:
    """Of each model with a number of ranks, a policy and a dtype of its own."""
    dtype = [None, torch.bfloat16][place % 2]
    check_minimum(MODELS[SAMPLE[place]], 1 + place % 3, POLICIES[place // 2 % 3], dtype)


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_the_least_budget_is_the_least_of_every_chunk_size_for_every_model(name: str) -> None:
    for world_size in (1, 2, 3):
        for policy in POLICIES:
            for dtype in (None, torch.bfloat16):
                check_minimum(MODELS[name], world_size, policy, dtype)


HALF = {"tensor_placement_policy": "static", "offload_optim_frac": 0.5}
LAST = {"tensor_placement_policy": "static", "offload_optim_frac": 0.8, "offload_param_frac": 0.3}
CUDA = {"tensor_placement_policy": "cuda"}
OPTIMIZERS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("odd_shapes", 2, 0, CUDA),
    ("zero_size", 2, 1, HALF),
    ("borrowed", 3, 1, LAST),
    ("vit", 2, 3, HALF),
    ("odd_shapes", 3, 3, CUDA),
    ("llama", 1, 0, HALF),
]
"""Model, ranks, states per element that the optimizer keeps, and the policy, which is one whose least depends on them.

Chunks are there before the optimizer, so that their size has to suit whichever comes.
"""


def check_minimum_of(
    name: str, world_size: int, states: int, policy: dict[str, Any], dtype: torch.dtype | None
) -> None:
    case = MODELS[name]
    settings = settings_of(case, dtype, **policy)
    module = case.build(torch.float32)

    def planned(**options: Any) -> Plan:
        return estimate_memory(module, world_size=world_size, settings=settings, optim_states=states, **options).plan

    sizes = chunk_sizes(specs_of(module, settings, world_size), world_size)
    least = [planned(chunk_size=size).packed_minimum_bytes for size in sizes]
    wanted = min(each for each in least if each is not None)
    at_least = planned(model_data_memory=wanted)
    assert at_least.device_bytes <= wanted == at_least.minimum_bytes == planned().minimum_bytes
    with pytest.raises(BudgetError) as refused:
        planned(model_data_memory=wanted - 1)
    assert refused.value.needed_bytes == wanted


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", range(len(OPTIMIZERS)))
def test_the_least_budget_of_another_optimizer_is_the_least_of_every_chunk_size(place: int) -> None:
    check_minimum_of(*OPTIMIZERS[place], [None, torch.bfloat16][place % 2])


def train_within(case: ModelCase, budget: int, momentum: float = 0.0, **policy: Any) -> None:
    model = ShardedModel(case.build(), device="emulated", host_memory="4GB", model_data_memory=budget, **policy)
    ShardedOptimizer(model, torch.optim.SGD(model.parameters(), momentum=momentum))


def train_at_minimum(rank: int, world_size: int, case: ModelCase, steps: int) -> None:
    """And with one byte more; a byte less is refused. Collective."""
    settings = settings_of(case, None)
    least = plan_model(specs_of(case.build(), settings, world_size), settings, world_size).minimum_bytes
    assert least is not None
    wanted = wanted_on(rank, train_plain(case, steps, world_size))
    for budget in (least, least + 1):
        run, facts = train_sharded(case, Recipe(steps=steps), rank, chunk_size=None, model_data_memory=budget)
        assert facts.peak_bytes <= budget, case.name
        assert_equal_runs(run, wanted, bits=case.name != OFTEN_REDUCED)
    if least:
        with pytest.raises(BudgetError) as refused:
            train_within(case, least - 1)
        assert refused.value.needed_bytes == least, case.name


EVERY = [name for name in MODELS if name != "mixed_dtypes"]  # HybridAdam has no fp64


@on_ranks_with(
    "names",
    {1: [TRAINED]},
    soak={1: [EVERY], 2: [TRAINED[:2], EVERY[::2], EVERY[1::2]], 3: [EVERY[::3]]},
    ids=lambda names: f"{len(names)}-models-from-{names[0]}",
    timeout_s=600.0,
)
def test_a_model_trains_at_its_least_budget_with_the_bits_of_the_plain_one(
    rank: int, world_size: int, names: list[str]
) -> None:
    for name in names:
        train_at_minimum(rank, world_size, MODELS[name], steps=2)


@pytest.mark.sampled(3)
@on_ranks(1, 2)
@pytest.mark.parametrize("policy", [CUDA, HALF, LAST], ids=["cuda", "half", "last"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_trains_at_its_least_budget_where_adam_would_not_fit(
    rank: int, world_size: int, momentum: float, policy: dict[str, Any]
) -> None:
    """The model is wrapped for inference then, with chunks of a size that suits the optimizer to come."""
    case, options = MODELS["odd_shapes"], {"device": "emulated", "host_memory": "4GB", **policy}
    states = 1 if momentum else 0
    least = estimate_memory(case.build(), world_size=world_size, optim_states=states, **options).plan.minimum_bytes
    assert least is not None
    sgd: dict[str, Any] = {"steps": 2, "optimizer": "sgd", "momentum": momentum}
    wanted = wanted_on(rank, train_plain(case, world_size=world_size, **sgd))
    run, facts = train_sharded(case, Recipe(**sgd), rank, chunk_size=None, model_data_memory=least, **policy)
    assert facts.peak_bytes <= least
    assert_equal_runs(dataclasses.replace(run, norms=None), wanted)  # torch adds the squares up in another order
    with pytest.raises(BudgetError) as refused:
        train_within(case, least - 1, momentum, **policy)
    assert refused.value.needed_bytes == least


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [{}, HALF, LAST], ids=["auto", "half", "last"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_trains_with_the_least_host_memory_of_every_chunk_size(momentum: float, policy: dict[str, Any]) -> None:
    """Which depends on the chunk size by what rests there, and by gradients that find no slot on the device."""
    case, states = MODELS["odd_shapes"], 1 if momentum else 0
    settings = Settings(device="emulated", **policy)
    sizes, least = chunk_sizes(specs_of(case.build(), settings, 1), 1), []
    settings = dataclasses.replace(settings, model_data_memory=110_000 if policy is LAST else 95_000)
    for size in sizes:
        with contextlib.suppress(BudgetError):
            given = dataclasses.replace(settings, chunk_size=size)
            plan = estimate_memory(case.build(), settings=given, optim_states=states).plan
            least.append(plan.predicted.host_peak)
    settings = dataclasses.replace(settings, host_memory=min(least))
    model = ShardedModel(case.build(), settings=settings)
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), momentum=momentum))
    for step in range(2):
        case.loss(model, case.batch(step, 0, 1, 0)).backward()
        optimizer.step()
    assert model.chunk_manager.memory.host.ledger.peak_bytes <= min(least)
    model.close()


def read_weight(model: ShardedModel, *given: Any) -> None:
    weight(model, 4).detach().norm()


def test_only_weights_that_share_chunks_have_a_slot_to_spare_at_the_least_budget() -> None:
    """A weight that is larger than a chunk is not read while another such operator has its slots."""
    for chunk_size in (CHUNK_NUMEL, 1):
        where: dict[str, Any] = {"device": "emulated", "chunk_size": chunk_size}
        model = ShardedModel(build(), model_data_memory=minimum_bytes(build(), **where), **where)
        reads = layer_of(model, 2).register_forward_pre_hook(partial(read_weight, model))
        if chunk_size == 1:
            with pytest.raises(SlotError, match=r"layers\.4 needs chunk .* all 2 slots of 1024 bytes are in use"):
                loss_of(model)
            reads.remove()
        loss_of(model).backward()
        model.close()
