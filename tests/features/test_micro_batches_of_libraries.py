"""Training loops of other libraries tell the plan how many micro-batches make a step: it has room for their sums."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from gemini import Kind, ShardedModel, Tier
from gemini.integrations.accelerate import Accelerator
from gemini.integrations.lightning import GeminiStrategy
from optim import HybridAdam
from tests.zoo import hf_trainers, lightning_modules
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, build, loss_of

SMALL: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"}


def planned_gradient_bytes(model: ShardedModel) -> int:
    """Of gradients, the sums of micro-batches included."""
    found = [
        model.plan.placement.bytes_by_kind(model.plan.demand, tier)[Kind.GRAD] for tier in (Tier.DEVICE, Tier.HOST)
    ]
    return sum(found)


def check(model: ShardedModel, number: int, numel: int = LAYERS * CHUNK_NUMEL) -> None:
    """16-bit gradients, and their fp32 sums if there are several micro-batches."""
    assert model.settings.gradient_accumulation_steps == number
    assert planned_gradient_bytes(model) == (2 if number == 1 else 6) * numel


@pytest.mark.parametrize(
    ("more", "number"),
    [
        ({}, 1),
        ({"gradient_accumulation_steps": 3}, 3),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)}, 2),
        ({"gemini": {**SMALL, "gradient_accumulation_steps": 4}}, 4),
        ({"gemini": {**SMALL, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}}, 2),
    ],
    ids=["no word", "argument", "plugin", "config", "batch sizes"],
)
def test_an_accelerator_tells_the_plan_its_micro_batches(more: dict[str, Any], number: int) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", **{"gemini": SMALL, **more})
    model = accelerator.prepare(build())
    check(model, number)
    model.close()


@pytest.mark.parametrize("number", [1, 3])
def test_lightnings_trainer_tells_the_plan_its_micro_batches(number: int, tmp_path: Path) -> None:
    strategy = GeminiStrategy(**SMALL)
    more: dict[str, Any] = {"precision": "bf16-true", "accumulate_grad_batches": number, "max_steps": 1}
    fit = lightning_modules.trainer(tmp_path, strategy, enable_checkpointing=False, **more)
    fit.fit(lightning_modules.Plain(), lightning_modules.loader())
    assert isinstance(strategy.model, ShardedModel)
    check(strategy.model, number)


def test_lightning_that_only_evaluates_or_decides_later_plans_as_without_a_number(tmp_path: Path) -> None:
    """A callback that changes the number from epoch to epoch finds room beside the plan, as before."""
    evaluates = GeminiStrategy(**SMALL)
    lightning_modules.trainer(tmp_path, evaluates, accumulate_grad_batches=1, enable_checkpointing=False).validate(
        lightning_modules.Plain(), lightning_modules.loader(4), verbose=False
    )
    assert isinstance(evaluates.model, ShardedModel)
    assert evaluates.model.settings.gradient_accumulation_steps is None
    strategy = GeminiStrategy(**SMALL)
    later = GradientAccumulationScheduler({0: 2})
    fit = lightning_modules.trainer(
        tmp_path, strategy, callbacks=[later], precision="bf16-true", enable_checkpointing=False, max_steps=2
    )
    fit.fit(lightning_modules.Plain(), lightning_modules.loader())
    assert isinstance(strategy.model, ShardedModel)
    assert (fit.global_step, fit.accumulate_grad_batches) == (2, 2)
    check(strategy.model, 1)


@pytest.mark.parametrize(("given", "number"), [(None, 2), (3, 3)])
def test_a_trainer_tells_the_plan_its_micro_batches_unless_it_is_told_itself(
    given: int | None, number: int, tmp_path: Path
) -> None:
    """TrainingArguments say 2."""
    sharded: dict[str, Any] = {**hf_trainers.SHARDED, "dtype": torch.bfloat16, "model_data_memory": None}
    if given is not None:
        sharded["gradient_accumulation_steps"] = given
    trainer = hf_trainers.trainer(tmp_path, sharded=sharded, bf16=True)
    model = trainer.sharded_model
    numel = sum(chunk.layout.numel for chunk in model.plan.packing.chunks)
    check(model, number, numel)
    trainer.end()


def test_a_number_that_changes_later_takes_its_sums_beside_the_plan() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gemini=SMALL)
    model, optimizer = accelerator.prepare(plain := build(), HybridAdam(plain.parameters()))
    check(model, 1)
    accelerator.gradient_accumulation_steps = 2
    for micro in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, micro))
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.optimizer.last_step is not None
    model.close()
