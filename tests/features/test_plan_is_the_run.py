"""What a plan predicts is what a run does: bytes over each link, collectives and model data held, 0 bytes off.

Every step is compared, the first one too. In that one chunks leave in the order of their last use and nothing is
gathered ahead, since no pass has shown the order of uses yet: the prediction begins there as the run does.
"""

from functools import partial
from typing import Any

import pytest
import torch

from gemini import estimate_memory
from gemini.placement.predict import predict
from gemini.placement.simulate import MoveReason
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.predicted import Case, Peaks, differences, measure, random_case, run, run_inference
from tests.zoo import mlp
from tests.zoo.models import MODELS

# A function that borrows a weight outside its operator, and operators that data chooses, are in no schedule; HybridAdam
# updates no fp64 weights; a batch norm's buffers stay fp32 and do not meet 16-bit inputs in plain PyTorch.
NOT_PREDICTED = {"borrowed", "norm_penalty", "norm_penalty_outside", "parameter_containers", "mixed_dtypes"}
NOT_PREDICTED |= {"twice_in_one_operation"}
NOT_PREDICTED |= {"sometimes_unused", "experts", "experts_same_on_all_ranks", "batch_norm", "mixtral", "qwen3_moe"}
PREDICTED = [name for name in MODELS if name not in NOT_PREDICTED]

ON_ONE = [
    Case("chain", clip=0.05),
    Case("frozen_body", policy="cpu", micro=2),
    Case("tied", dtype="bf16", budget=0.5, strategy="bucket", micro=3),
    Case("checkpoint_block", dtype="fp16", budget=0.3),
    Case("large_embedding", dtype="bf16", budget=0.1, reuse=True),
    Case("checkpoint_shared_reentrant", policy="cpu", accumulate="fp32", chunk=0.5),
    Case("tied", dtype="bf16", budget=0.3, in_backward=True),
    Case("chain", policy="cpu", in_backward=True),
]
ON_TWO = [
    Case("chain", micro=2, chunk=0.5, prefetch=4),
    Case("frozen_body", budget=0.3, strategy="tensor", prefetch=0),
    Case("tied", stage=1, budget=0.5, micro=2, accumulate="fp32"),
    Case("nested", stage=2, policy="cpu", dtype="bf16", clip=0.05),
    Case("layer_norm", dtype="bf16", reuse=True, budget=0.5, prefetch=4),
    Case("checkpoint_all", budget=0.1, dtype="fp16", reduce="fp32", strategy="bucket", prefetch=4),
    Case("several_forwards", dtype="fp16", accumulate="fp32", chunk=0.5),
    Case("checkpoint_shared_reentrant", dtype="bf16", accumulate="fp32", chunk=None),
    Case("checkpoint_block", budget=0.1, dtype="bf16", in_backward=True),
]


def random_cases(first: int, count: int) -> list[Case]:
    return [random_case(seed, PREDICTED) for seed in range(first, first + count)]


@on_ranks_with(
    "training",
    {1: ON_ONE, 2: ON_TWO[::3]},
    soak={1: random_cases(0, 40), 2: [*ON_TWO, *random_cases(1000, 45)], 3: random_cases(2000, 15)},
)
def test_every_byte_of_a_step_is_predicted(rank: int, world_size: int, training: Case) -> None:
    predicted, measured, said = run(training, rank, world_size)
    assert differences(predicted, measured) == []
    assert not [each for each in said if not each.startswith("step 0")], "a step warned"


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize(
    "training",
    [
        Case("chain", prefetch=4),
        Case("nested", dtype="bf16", policy="cpu", prefetch=0),
        Case("tied", budget=0.3, dtype="fp16"),
    ],
    ids=str,
)
def test_every_byte_of_an_inference_is_predicted(rank: int, world_size: int, training: Case) -> None:
    predicted, measured = run_inference(training, rank, world_size)
    assert differences(predicted, measured) == []


def test_weights_that_ranks_keep_whole_on_the_host_cross_the_link_once_each_way() -> None:
    """At stage 2 an update on the host brings each rank's part to the device, and the others' parts back from there."""
    wrap = {"chunk_size": mlp.CHUNK_NUMEL, "tensor_placement_policy": "cpu", "stage": 2}
    plan = estimate_memory(mlp.build(), world_size=2, **wrap).plan
    weights = sum(chunk.payload_bytes for chunk in plan.packing.chunks)
    copies = plan.predicted.copies
    assert copies["host->device", MoveReason.UPDATE] == copies["device->host", MoveReason.UPDATE] == weights // 2


def test_a_plan_knows_a_step_of_a_model_whose_operators_run_in_order() -> None:
    """Without a dry run: from the module tree alone."""
    model, optimizer = mlp.sharded("smallest")
    links = model.chunk_manager.memory.transfer.bytes_by_link
    for step in range(3):
        before = dict(links)
        mlp.train_step(model, optimizer, step)
        moved = {link: num_bytes - before.get(link, 0) for link, num_bytes in links.items()}
        assert moved == model.plan.predicted.bytes_by_link


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize(
    "options",
    [
        {"place": "smallest", "max_prefetch": 4},
        {"place": "auto", "dtype": torch.bfloat16},
        {"place": "cpu", "dtype": torch.bfloat16, "stage": 2},
    ],
    ids=lambda options: options["place"],
)
def test_a_plan_knows_a_step_of_as_many_micro_batches_as_it_was_told(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    """`gradient_accumulation_steps` are in `plan.predicted`, and in what `explain()` says of a step."""
    model, optimizer = mlp.sharded(**options, gradient_accumulation_steps=3)
    peaks, measured = Peaks(model), []

    def train(step: int) -> None:
        for micro in range(3):
            optimizer.backward(mlp.loss_of(model, 3 * step + micro + rank, options.get("dtype")))
        optimizer.step()

    for step in range(4):
        measured.append(measure(model, peaks, world_size, partial(train, step)))
    predicted = model.plan.predicted
    assert differences([predicted] * 2, measured[2:]) == []
    assert predicted != predict(model.plan, micro_batches=1)
    words = model.plan.explain()
    for num_bytes in predicted.bytes_by_link.values():
        assert f"{num_bytes} bytes" in next(
            line for line in words.splitlines() if line.startswith("In all, a step of 3")
        )
    model.close()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("place", ["smallest", "auto"])
def test_a_plan_learns_what_a_step_of_several_micro_batches_moves(rank: int, world_size: int, place: str) -> None:
    """Nobody has told their number, and two steps have shown it."""
    model, optimizer = mlp.sharded(place, dtype=torch.bfloat16)
    peaks, measured = Peaks(model), []

    def train(step: int) -> None:
        for micro in range(3):
            optimizer.backward(mlp.loss_of(model, 3 * step + micro + rank, torch.bfloat16))
        optimizer.step()

    at_first = model.plan.predicted
    for step in range(5):
        measured.append(measure(model, peaks, world_size, partial(train, step)))
    assert differences([model.plan.predicted] * 2, measured[3:]) == []
    assert model.plan.predicted != at_first
    model.close()


def test_a_plan_knows_a_step_after_weights_were_frozen() -> None:
    """Backward does not read what is before the first weight that is trained."""
    model, optimizer = mlp.sharded("smallest")
    mlp.train_step(model, optimizer)
    for layer in model.module.layers[:3]:
        layer.requires_grad_(False)
    links = model.chunk_manager.memory.transfer.bytes_by_link
    for step in range(1, 5):
        before = dict(links)
        mlp.train_step(model, optimizer, step)
    moved = {
        link: num_bytes - before.get(link, 0) for link, num_bytes in links.items() if num_bytes != before.get(link)
    }
    assert moved == model.plan.predicted.bytes_by_link
    assert model.plan.predicted.device_peak <= model.plan.device_bytes


def test_a_prediction_takes_no_model_and_no_ranks() -> None:
    """More ranks move less each, and a device with room for everything moves nothing over its link."""
    module = mlp.build()
    wrap = {"chunk_size": mlp.CHUNK_NUMEL}
    on_host = [estimate_memory(module, world_size=n, tensor_placement_policy="cpu", **wrap).plan for n in (1, 2)]
    few, many = (predict(plan).bytes_by_link["device->host"] for plan in on_host)
    assert few == 2 * many
    whole = estimate_memory(module, world_size=2, tensor_placement_policy="cuda", **wrap).plan
    assert whole.predicted.bytes_by_link == {}
    assert whole.predicted.device_peak == whole.device_bytes
