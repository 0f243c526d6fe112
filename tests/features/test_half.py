"""Half precision: the bits of a plain module with fp32 masters, wherever gradients rest and travel."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import state_hash
from tests.harness.on_ranks import on_ranks_with
from tests.harness.pairwise import all_pairs
from tests.harness.reference import Recipe, train_plain
from tests.harness.runs import assert_equal_runs, wanted_on
from tests.harness.sharded import train_sharded
from tests.zoo import half
from tests.zoo.half import PLACES, Trained
from tests.zoo.models import MODELS

KEPT = {"tensor_placement_policy": "cuda"}  # at stage 3 the parameter homes lie in kept slots
HOST = {"tensor_placement_policy": "cpu"}
RANK_PLACES: list[dict[str, Any]] = [
    {"stage": 0, **KEPT},
    {"stage": 1, **HOST},
    {"stage": 2, **KEPT},
    {"stage": 2, "shard_strategy": "tensor", "chunk_size": 4096, **KEPT},  # several units: homes are not lent
    {"stage": 3, "model_data_memory": "smallest"},
]


def _id_of(value: Any) -> str:
    values = [*value.values()] if isinstance(value, dict) else value if isinstance(value, tuple) else None
    return str(value).replace("torch.", "") if values is None else "-".join(_id_of(each) for each in values)


# ---- beside plain PyTorch ----------------------------------------------------------------------------

IN_PIECES = "checkpoint_shared_reentrant"  # a parameter's gradient comes four times
COMBINATIONS = all_pairs(
    {
        "name": [
            "gpt2",
            "llama_checkpoint",
            "tied",
            "nested",
            "sometimes_unused",
            "multihead_attention",
            "frozen",
            IN_PIECES,
        ],
        "place": list(PLACES),
        "dtype": [torch.bfloat16, torch.float16],
        "reuse": [True, False],
        "accumulation": [1, 2],
        "accumulate_dtype": [None, torch.bfloat16, torch.float32],
        "clip": [None, 0.05],
        "strategy": ["chunk", "tensor"],
    },
    allowed=lambda c: (
        not (
            (c["reuse"] and c["accumulate_dtype"] is torch.float32)
            # in the first backward the pieces would be rounded to another 16-bit dtype one by one (docs/assumptions.md)
            or (c["name"] == IN_PIECES and c["dtype"] is torch.float16 and c["accumulate_dtype"] is torch.bfloat16)
        )
    ),
)

# (model, recipe, arguments of ShardedModel)
Job = tuple[str, dict[str, Any], dict[str, Any]]
FP16: dict[str, Any] = {"dtype": torch.float16, "loss_scale": 2.0**8}
BF16: dict[str, Any] = {"dtype": torch.bfloat16}
JOBS: list[Job] = [
    ("gpt2", {**FP16}, {"reuse_fp16_shard": True, "model_data_memory": "smallest"}),
    ("nested", {**FP16, "accumulation": 2, "clip": 0.05}, {"reuse_fp16_shard": True, "stage": 2}),
    ("tied", {**BF16}, {"reuse_fp16_shard": True, "stage": 1}),
    ("nested", {**BF16, "reduce_dtype": torch.float32, "clip": 0.05}, {"reuse_fp16_shard": True, "stage": 3}),
    ("chain", {**BF16, "reduce_dtype": torch.float32, "accumulate_dtype": torch.float32}, {"stage": 0}),
    ("chain", {**FP16, "accumulate_dtype": torch.float32, "accumulation": 2}, {"model_data_memory": "smallest"}),
    ("chain", {**BF16, "accumulate_dtype": torch.bfloat16, "accumulation": 2}, {"reuse_fp16_shard": True}),
    ("chain", {"reduce_dtype": torch.bfloat16}, {"shard_strategy": "tensor", "stage": 1}),
    ("chain", {"reduce_dtype": torch.float16, "accumulate_dtype": torch.bfloat16, "accumulation": 2}, {"stage": 2}),
]


def _job_of(c: dict[str, Any]) -> Job:
    recipe = {key: c[key] for key in ("dtype", "accumulation", "clip", "accumulate_dtype")}
    recipe["loss_scale"] = 2.0**8 if c["dtype"] is torch.float16 else 1.0
    return c["name"], recipe, {"reuse_fp16_shard": c["reuse"], "shard_strategy": c["strategy"], **PLACES[c["place"]]}


ONE_RANK = [_job_of(c) for c in COMBINATIONS]


@pytest.mark.filterwarnings("ignore:reuse_fp16_shard")
@on_ranks_with(
    "job",
    {1: ONE_RANK[::3], 2: JOBS[::3], 4: JOBS[2:3]},
    soak={1: ONE_RANK, 2: JOBS, 4: JOBS[2:5]},
    ids=_id_of,
    timeout_s=240,
)
def test_half_precision_has_the_bits_of_a_plain_module_with_masters(rank: int, world_size: int, job: Job) -> None:
    """What a rank sends is rounded to what travels, the mean made in fp32 and rounded once: in bits."""
    name, options, wrap = job
    case, recipe = MODELS[name], Recipe(steps=3, world_size=world_size, **options)
    run, facts = train_sharded(case, recipe, rank, read_grads=False, **wrap)
    plain = train_plain(case, 3, world_size, **options)
    assert_equal_runs(run, dataclasses.replace(wanted_on(rank, plain), grads=None))
    assert facts.budget_bytes is None or facts.peak_bytes <= facts.budget_bytes


# ---- gradients in the parameters' homes --------------------------------------------------------------

BOTH = (torch.bfloat16, torch.float16)
SOME = ("saves", "adds_another", "skips", "changes", "sets_weights", "edits", "drops_all", "keeps_views")
SOME += ("writes_gradients", "gives_gradients")
FEW = ("adds_before_reducing", "skips")
# (arguments of ShardedModel, detours or none for all)
Setting = tuple[dict[str, Any], tuple[str, ...]]
DETOURS: dict[int, list[Setting]] = {
    1: [({"dtype": dtype, **place}, ()) for dtype in BOTH for place in PLACES.values()],
    2: [({"stage": 3, **KEPT}, SOME), *((place, FEW) for place in RANK_PLACES)],
}
EVERY: list[Setting] = [(place, ()) for place in (*RANK_PLACES, {"stage": 3, **KEPT}, {"stage": 1, **KEPT})]


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore")
@on_ranks_with("setting", DETOURS, soak={2: EVERY, 3: EVERY}, ids=_id_of, timeout_s=600)
def test_detours_between_backward_and_step(rank: int, world_size: int, setting: Setting) -> None:
    """What is done between backward and step has the same end, wherever gradients rest."""
    wrap, names = setting
    for detour in half.DETOURS:
        if names and detour.__name__[1:] not in names:
            continue
        if detour.__name__ == "_keeps_views" and "model_data_memory" in wrap:
            continue  # a view takes a slot, and there is none to spare
        hashes, losses = zip(*(half.end_of(Trained(rank, world_size, reuse, wrap), detour) for reuse in (False, True)))
        assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1])), (detour.__name__, wrap)
        assert hashes[0] == hashes[1], (detour.__name__, wrap)


SAVED: dict[int, list[dict[str, Any]]] = {
    1: [{"dtype": dtype, **place} for dtype in BOTH for place in PLACES.values()],
    2: [{"stage": 1}, {"stage": 2, **HOST}, {"stage": 3, **KEPT}],
}


@pytest.mark.sampled(4)
@on_ranks_with("wrap", SAVED, ids=_id_of, timeout_s=120)
def test_masters_are_saved_and_loaded_without_loss(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Masters leave and enter whole, from and to either layout, before or after the weights."""
    source = {reuse: Trained(rank, world_size, reuse, wrap) for reuse in (False, True)}
    for trained in source.values():
        trained.step(0)
        trained.step(1)
    states = {reuse: (t.model.state_dict(), t.optimizer.state_dict()) for reuse, t in source.items()}
    for number, master in states[True][1]["masters"].items():
        assert torch.equal(states[False][1]["masters"][number], master), "layouts hold the same masters"
    expected = None
    for reuse in (False, True):
        for weights, states_of_optimizer in (states[reuse], states[not reuse]):
            for optimizer_first in (False, True):
                loaded = Trained(rank, world_size, reuse, wrap)
                if optimizer_first:
                    loaded.optimizer.load_state_dict(states_of_optimizer)
                    loaded.model.load_state_dict(weights)
                else:
                    loaded.model.load_state_dict(weights)
                    loaded.optimizer.load_state_dict(states_of_optimizer)
                loaded.step(2)
                found = state_hash(loaded.model, loaded.optimizer)
                expected = expected or found
                assert found == expected, (reuse, optimizer_first)
                loaded.model.close()
    source[False].step(2)
    assert state_hash(source[False].model, source[False].optimizer) == expected, "as if it had gone on"
    for trained in source.values():
        trained.model.close()


Sizes = tuple[dict[str, Any], tuple[float, float]]


def _sizes(wrap: dict[str, Any], fp16: tuple[float, float], bf16: tuple[float, float]) -> list[Sizes]:
    return [({"dtype": dtype, **wrap}, wanted) for dtype, wanted in ((torch.float16, fp16), (torch.bfloat16, bf16))]


# arguments of ShardedModel -> bytes a parameter over all ranks' shares, without and with reuse: 2 + 4 + 8, and
# 2 + 2 + 8 with a split master; what is whole on every rank is whole
BYTES: dict[int, list[Sizes]] = {
    1: [each for place in PLACES.values() for each in _sizes(place, (16, 14), (14, 14))],
    2: [
        *_sizes({"stage": 0, **KEPT}, (16, 14), (14, 14)),
        *_sizes({"stage": 1, **KEPT}, (2 + 2 + 12 / 2, 2 + 12 / 2), (2 + 2 + 10 / 2, 2 + 12 / 2)),
        *_sizes({"stage": 2, **KEPT}, (2 + 14 / 2, 2 + 12 / 2), (2 + 12 / 2, 2 + 12 / 2)),
        *_sizes({"stage": 3, **KEPT}, (16 / 2, 14 / 2), (14 / 2, 14 / 2)),
        *_sizes({"stage": 3, **HOST}, (16 / 2, 14 / 2), (14 / 2, 14 / 2)),
    ],
}


@on_ranks_with("setting", {size: settings[::3] for size, settings in BYTES.items()}, soak=BYTES, ids=_id_of)
def test_fp16_takes_two_bytes_a_parameter_less_and_bf16_fourteen_either_way(
    rank: int, world_size: int, setting: Sizes
) -> None:
    wrap, wanted = setting
    with warnings.catch_warnings():
        warnings.simplefilter("error" if wrap["dtype"] is torch.float16 else "default")  # nothing is lost or said
        assert _bytes_per_parameter(rank, world_size, wrap) == wanted


def _bytes_per_parameter(rank: int, world_size: int, wrap: dict[str, Any]) -> tuple[float, float]:
    """Of parameters, gradients, masters and moments of all ranks' shares, without and with reuse; after three steps."""
    found = []
    for reuse in (False, True):
        trained = Trained(rank, world_size, reuse, wrap)
        for step in range(3):
            trained.step(step)
        found.append(
            sum(half.state_bytes(trained.model).values()) / sum(c.numel for c in trained.model.chunk_manager.chunks)
        )
        trained.model.close()
    return found[0], found[1]


@on_ranks_with("wrap", {1: [PLACES["auto"]], 2: [{"stage": 3, **KEPT}]}, ids=_id_of)
def test_the_loss_scale_of_twenty_steps(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="skipped on all ranks"):
        (apart, scales), (shared, its_scales) = (
            _losses_and_scales(rank, world_size, reuse, wrap) for reuse in (False, True)
        )
    assert torch.equal(torch.stack(shared), torch.stack(apart))
    assert its_scales == scales and {1024.0, 2048.0} == set(scales)


def _losses_and_scales(
    rank: int, world_size: int, reuse: bool, wrap: dict[str, Any]
) -> tuple[list[Tensor], list[float]]:
    """20 steps of fp16, two of them skipped."""
    trained = Trained(rank, world_size, reuse, {"dtype": torch.float16, **wrap})
    trained.optimizer._scaling.active.growth_interval = 4  # type: ignore[union-attr]
    scales = []
    for step in range(20):
        trained.backward(step, float("inf") if step in (5, 12) and rank == 0 else 1.0)
        trained.optimizer.step()
        scales.append(trained.optimizer.loss_scale)
    losses = trained.losses
    trained.model.close()
    return losses, scales
