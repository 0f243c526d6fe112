"""Training by `transformers.Trainer` and under `Accelerator.prepare`: the model as it is, on one rank with its bits."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import Dataset

from gemini import ShardedOptimizer, UnsupportedError
from tests.harness.on_ranks import on_ranks
from tests.zoo.hf_models import gpt2
from tests.zoo.mlp import adam, assert_same, both_dtypes, build, loss_of, plain, sharded, train_step, weights_of, wrap

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def _gpt2() -> nn.Module:
    model: nn.Module = gpt2().model  # type: ignore[union-attr]
    return model


def _assert_close(model: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.state_dict())
    for name, value in weights_of(model).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-4)  # AdamW's steps are of 1e-2


@needs_accelerate
@on_ranks(2)
def test_accelerate_trains_the_model_as_it_is_on_ranks(rank: int, world_size: int) -> None:
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


@needs_accelerate
@on_ranks(2)
def test_mixed_precision_of_accelerate_is_refused(rank: int, world_size: int) -> None:
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


@needs_accelerate
@on_ranks(2)
@both_dtypes
def test_training_goes_on_from_a_state_that_accelerate_saved(
    rank: int, world_size: int, dtype: torch.dtype | None
) -> None:
    """In a new model with other weights, as a new process would make it: the bits of a training that went on."""
    import accelerate

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    runs = []
    for number in range(2):
        model, optimizer = sharded(dtype=dtype)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        accelerator = accelerate.Accelerator(cpu=True)
        prepared = accelerator.prepare(model, optimizer, schedule)
        if number == 0:
            for step in range(2):
                _accelerated_step(accelerator, *prepared, step, dtype)
            accelerator.save_state(folder[0])
            accelerator.wait_for_everyone()
        else:
            _accelerated_step(accelerator, *prepared, 7, dtype)
            accelerator.load_state(folder[0])
        _accelerated_step(accelerator, *prepared, 2, dtype)
        runs.append(weights_of(model) | {"exp_avg": optimizer.state_dict()["state"][0]["exp_avg"]})
        model.close()
    assert_same(*runs)
    if rank == 0:
        wanted = {name: value.shape for name, value in build().state_dict().items()}
        saved = safetensors.torch.load_file(os.path.join(folder[0], "model.safetensors"))
        assert {name: value.shape for name, value in saved.items()} == wanted
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def _accelerated_step(
    accelerator: Any, model: nn.Module, optimizer: Any, schedule: Any, step: int, dtype: torch.dtype | None
) -> None:
    accelerator.backward(loss_of(model, step, dtype))
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


@needs_accelerate
@on_ranks(2)
def test_what_would_save_the_model_by_another_librarys_functions_is_refused(rank: int, world_size: int) -> None:
    """Accelerate takes FSDP or DeepSpeed from its own configuration, on a GPU: here its state is set to them."""
    import accelerate
    from accelerate.state import DistributedType, PartialState

    model, optimizer = sharded()
    accelerator = accelerate.Accelerator(cpu=True)
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PartialState._shared_state, "distributed_type", kind)
            with pytest.raises(UnsupportedError, match=f"^Accelerate is set to {kind.value}.* choose its plain"):
                accelerator.prepare_model(model)
    train_step(model, optimizer)
    model.close()


@needs_accelerate
@on_ranks(2)
def test_a_trainer_trains_the_model_as_it_is_on_ranks(rank: int, world_size: int) -> None:
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
