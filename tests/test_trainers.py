"""Training by `transformers.Trainer` and under `Accelerator.prepare`: the bits of the plain model."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from gemini import ShardedOptimizer
from tests.hf_models import gpt2
from tests.mlp import adam, assert_same, build, loss_of, plain, sharded, train_step, weights_of, wrap


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def _gpt2() -> nn.Module:
    model: nn.Module = gpt2().model  # type: ignore[union-attr]
    return model


def test_a_hugging_face_trainer_trains_and_evaluates(tmp_path: Path) -> None:
    """`label_names` is said, as for any model that is not one of Hugging Face's classes itself."""
    import transformers

    model, reference = wrap(make=_gpt2, chunk_size=16384), build(_gpt2)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    losses = []
    for each, its in ((model, optimizer), (reference, adam(reference.parameters()))):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            max_grad_norm=0,  # the norm of torch's own clipping has other bits than the exact one
            label_names=["labels"],
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(its, lambda step: 1 / (1 + step))
        trainer: Any = transformers.Trainer(each, arguments, train_dataset=Tokens(), optimizers=(its, schedule))
        trainer.train()
        losses.append(trainer.evaluate(Tokens())["eval_loss"])
    assert losses[0] == losses[1]
    assert_same(weights_of(model), dict(reference.state_dict()))


def test_accelerate_prepares_trains_and_saves(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    states = []
    for model, optimizer in (sharded(), plain()):
        accelerator = accelerate.Accelerator(cpu=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        for step in range(3):
            accelerator.backward(loss_of(model, step))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.save_state(tmp_path / "state")
        wanted = dict(accelerator.get_state_dict(model))
        accelerator.backward(loss_of(model, 3))
        optimizer.step()
        accelerator.load_state(tmp_path / "state")
        states.append(dict(accelerator.get_state_dict(model)))
        assert_same(states[-1], wanted)
        accelerator.save_model(model, tmp_path / "model")
        assert "model.safetensors" in os.listdir(tmp_path / "model")
    assert_same(*states)


def test_one_process_that_accelerate_launched_trains_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate wraps a plain model in DDP there, as it does on several ranks."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import DistributedType, PartialState

    model, optimizer = sharded()
    accelerator = accelerate.Accelerator(cpu=True)
    assert not hasattr(model, "_is_accelerate_prepared")
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.MULTI_CPU)
    assert accelerator.prepare_model(model) is model
    train_step(model, optimizer)
