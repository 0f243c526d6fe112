"""Accelerate and `transformers.Trainer` on several ranks, and a wrapper that reduces gradients itself."""

import tempfile
from typing import Any

import pytest
import torch
from torch import nn

from gemini import ShardedOptimizer, UnsupportedError
from tests.hf_models import gpt2
from tests.mlp import build, loss_of, plain, sharded, train_step, weights_of, wrap
from tests.test_trainers import Tokens


def _assert_close(model: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.state_dict())
    for name, value in weights_of(model).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-4)  # AdamW's steps are of 1e-2


def accelerate_trains_the_model_as_it_is(rank: int, world_size: int) -> None:
    import accelerate

    model, optimizer = sharded()
    reference, its = plain()
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    assert prepared is model
    for step in range(3):
        accelerator.backward(loss_of(prepared, step))
        prepared_optimizer.step()
        prepared_optimizer.zero_grad()
        train_step(reference, its, step)
    _assert_close(model, reference)
    assert accelerator.unwrap_model(prepared) is model
    model.close()


def mixed_precision_of_accelerate_is_refused(rank: int, world_size: int) -> None:
    import accelerate
    from accelerate.state import AcceleratorState

    model, optimizer = sharded()
    AcceleratorState._reset_state()
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        with pytest.raises(UnsupportedError, match=r"mixed_precision.*dtype=torch\.bfloat16"):
            accelerator.prepare(model, optimizer)
    finally:
        AcceleratorState._reset_state()
    train_step(model, optimizer)
    model.close()


def _gpt2() -> nn.Module:
    model: nn.Module = gpt2().model  # type: ignore[union-attr]
    return model


def a_trainer_trains_the_model_as_it_is(rank: int, world_size: int) -> None:
    """Ranks get halves of each batch: the loss is a mean over tokens, so the mean over ranks is the batch's."""
    import transformers

    model, reference = wrap(make=_gpt2, chunk_size=16384), build(_gpt2)
    # Adam divides by the gradient's size, which would blow up what another order of sums changes in small ones
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    its = torch.optim.SGD(reference.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=4 // world_size,
            max_steps=2,
            max_grad_norm=0,
            label_names=["labels"],
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer: Any = transformers.Trainer(model, arguments, train_dataset=Tokens(), optimizers=(optimizer, schedule))
        batches: list[Any] = []
        model.module.register_forward_pre_hook(
            lambda module, args, kwargs: batches.append((kwargs["input_ids"], kwargs.get("num_items_in_batch"))),
            with_kwargs=True,
        )
        trainer.train()
    for batch, num_items in batches:
        every = [torch.empty_like(batch) for _ in range(world_size)]
        torch.distributed.all_gather(every, batch)
        tokens = torch.cat(every)
        reference(input_ids=tokens, labels=tokens, num_items_in_batch=num_items).loss.backward()
        its.step()
        its.zero_grad()
    assert len(batches) == 2
    _assert_close(model, reference)
    model.close()
