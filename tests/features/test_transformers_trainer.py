"""`gemini.integrations.transformers.Trainer`: one line of a script is another, and it trains sharded under a budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import Subset

from gemini import ShardedModel, ShardedOptimizer, UnsupportedError, ZeroInitContext, state_hash
from gemini.integrations.transformers import Seq2SeqTrainer, Trainer
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.shared_folder import shared_folder
from tests.zoo.hf_trainers import (
    DTYPES,
    SHARDED,
    Recorded,
    Texts,
    arguments,
    by_hand,
    flags_of,
    gpt2,
    logged,
    trainer,
)

LITTLE = {**SHARDED, "model_data_memory": "185KiB"}  # too little for all weights at once


@on_ranks_with("dtype", {1: ["fp16"], 2: ["bf16"]}, soak={1: list(DTYPES), 2: list(DTYPES)})
def test_a_trainer_trains_as_the_same_loop_by_hand(rank: int, world_size: int, dtype: str) -> None:
    """Accumulation, clipping, weight decay by group and the schedule, with weights of each dtype: the same bits."""
    with shared_folder() as folder:
        ours = trainer(folder, **flags_of(dtype))
        seen = Recorded(ours.model)
        ours.train()
        rates = logged(ours, "learning_rate")
        model, optimizer, losses, norms = by_hand(seen.batches, rates, DTYPES[dtype])
        assert len(set(losses)) == 4
        assert logged(ours) == losses
        assert logged(ours, "grad_norm") == norms
        assert state_hash(ours.sharded_model, ours.optimizer) == state_hash(model, optimizer)
        assert {parameter.dtype for parameter in model.parameters()} == {DTYPES[dtype]}
        assert ours.sharded_model.plan.budget_bytes <= 300 * 1024
        assert ours.accelerator.mixed_precision == "no"  # a user's own code under its autocast would cast twice
    model.close()
    ours.sharded_model.close()


@on_ranks(1, 2)
def test_a_trainer_trains_as_the_plain_one_does(rank: int, world_size: int) -> None:
    """Within rounding: torch's fused AdamW and clipping, and DDP's sums, have other bits."""
    runs = []
    for kind in (transformers.Trainer, Trainer):
        with shared_folder() as folder:
            each = trainer(folder, kind=kind, eval_strategy="steps", eval_steps=2)
            each.train()
            predicted = each.predict(Texts())
            runs.append((logged(each), logged(each, "grad_norm"), logged(each, "eval_loss"), predicted))
            each.model_wrapped.close() if kind is Trainer else None
    (*wanted, plain), (*found, ours) = runs
    for its, theirs in zip(found, wanted, strict=True):
        assert its == pytest.approx(theirs, rel=1e-4)
    assert len(found[2]) == 2
    assert ours.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-4)
    assert ours.predictions.shape == (24, 16, 256)
    assert ours.predictions == pytest.approx(plain.predictions, abs=1e-3)  # logits of about 1, after four steps
    assert (ours.label_ids == plain.label_ids).all()


@on_ranks(1, 2)
def test_labels_are_smoothed_and_metrics_computed_as_by_the_plain_trainer(rank: int, world_size: int) -> None:
    """The names of labels are found by themselves, as the model is one of Hugging Face's own classes."""
    found = []
    for kind in (transformers.Trainer, Trainer):
        with shared_folder() as folder:
            each = trainer(folder, kind=kind, label_smoothing_factor=0.1, compute_metrics=_mean_argmax)
            assert each.label_names == ["labels"]
            each.train()
            metrics = each.evaluate()
            found.append((logged(each), [metrics["eval_loss"], metrics["eval_mean"]]))
            each.model_wrapped.close() if kind is Trainer else None
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-2)  # an argmax may flip


def _mean_argmax(prediction: Any) -> dict[str, float]:
    return {"mean": float(prediction.predictions.argmax(-1).mean())}


class Told(transformers.TrainerCallback):
    """What it is told, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)


def test_callbacks_are_told_what_they_are_told_by_the_plain_trainer(tmp_path: Path) -> None:
    events = []
    for kind in (transformers.Trainer, Trainer):
        told = Told()
        trainer(tmp_path, kind=kind, callbacks=[told], eval_strategy="steps", eval_steps=2).train()
        events.append(told.events)
    assert events[0] == events[1]
    assert events[0].count("on_substep_end") == 4


@on_ranks(1, 2)
def test_a_skipped_step_leaves_the_schedule_where_it_is(rank: int, world_size: int) -> None:
    class Overflows(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("inf") if self.state.global_step == 1 else loss

    with shared_folder() as folder:
        each = trainer(folder, kind=Overflows, fp16=True)
        with pytest.warns(UserWarning, match="skipped on all ranks"):
            each.train()
        assert each.lr_scheduler.last_epoch == 3
        assert each.optimizer.loss_scale == 2.0**16
        each.sharded_model.close()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_are_checkpointed(reentrant: bool, tmp_path: Path) -> None:
    flags = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    runs = []
    for more in ({}, flags):
        each = trainer(tmp_path, **more)
        each.train()
        runs.append(state_hash(each.sharded_model, each.optimizer))
    assert each.model.is_gradient_checkpointing
    assert runs[0] == runs[1]


def test_each_training_has_a_model_of_its_own_where_there_is_a_model_init(tmp_path: Path) -> None:
    each = trainer(tmp_path, model_init=lambda: gpt2(), save_strategy="steps", save_steps=2)
    each.train()
    first, hashed = each.sharded_model, state_hash(each.sharded_model, each.optimizer)
    each.train()
    assert each.sharded_model is not first
    assert state_hash(each.sharded_model, each.optimizer) == hashed
    each.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert state_hash(each.sharded_model, each.optimizer) == hashed


def test_a_second_training_goes_on_with_the_model_of_the_first(tmp_path: Path) -> None:
    runs = []
    for kind in (transformers.Trainer, Trainer):
        each = trainer(tmp_path, kind=kind)
        each.train()
        each.train()
        runs.append(logged(each))
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)


def test_an_optimizer_and_a_schedule_of_ones_own_are_used(tmp_path: Path) -> None:
    rates = []
    for wraps in (False, True):
        model: Any = ShardedModel(gpt2(), **SHARDED) if wraps else gpt2()
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = ShardedOptimizer(model, plain) if wraps else plain
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        each = trainer(tmp_path, model, sharded={} if wraps else SHARDED, optimizers=(optimizer, schedule))
        each.train()
        assert each.model.transformer.wte.weight is model.transformer.wte.weight
        rates.append((logged(each, "learning_rate"), logged(each)))
    assert rates[0] == rates[1]
    assert rates[0][0] == [0.5, 0.25, 0.125, 0.0625]


@on_ranks(1, 2)
def test_a_model_that_is_built_on_shards_trains(rank: int, world_size: int) -> None:
    runs = []
    for on_shards in (False, True):
        with shared_folder() as folder:
            with ZeroInitContext(enabled=on_shards):
                model = gpt2()
            each = trainer(folder, model)
            each.train()
            runs.append(state_hash(each.sharded_model, each.optimizer))
            each.sharded_model.close()
    assert runs[0] == runs[1]


@on_ranks(2)
def test_ranks_whose_sentences_end_early_go_on_with_the_others(rank: int, world_size: int) -> None:
    """Evaluation that generates, with weights that ranks gather from each other, is that of the plain Trainer."""
    found = []
    for kind in (transformers.Seq2SeqTrainer, Seq2SeqTrainer):
        with shared_folder() as folder:
            its: dict[str, Any] = {"predict_with_generate": True, "per_device_eval_batch_size": 1, "max_steps": 1}
            each = trainer(folder, _t5(), kind=kind, sharded=LITTLE, compute_metrics=_lengths, **its)
            each.train()
            predicted = each.predict(Subset(Texts(), range(8)))
            found.append((predicted.predictions, predicted.metrics["test_lengths"]))
            each.model_wrapped.close() if kind is Seq2SeqTrainer else None
    assert len({(row > 1).sum() for row in found[0][0]}) > 2, "sentences of several lengths"
    assert (found[0][0] == found[1][0]).all()


@on_ranks(2)
def test_ranks_generate_as_they_like_with_gathered_weights(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        each = trainer(folder, _t5(), sharded={**SHARDED, "model_data_memory": "1MiB"})
        with torch.no_grad(), each.gathered_for_generation() as model:
            length = 4 + 4 * rank
            one = model.generate(input_ids=torch.full((1, 4), 7), min_length=length, max_length=length)
        assert one.shape == (1, length)
        each.sharded_model.close()


@on_ranks(2)
def test_ranks_that_name_the_folder_by_their_own_clock_write_into_that_of_rank_0(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        each = trainer(folder / f"run_00-00-0{rank}", max_steps=1, save_steps=1, save_strategy="steps")
        each.train()
        assert each.args.output_dir == str(folder / "run_00-00-00")
        assert (folder / "run_00-00-00" / "checkpoint-1").is_dir()
        each.model_wrapped.close()


def _lengths(prediction: Any) -> dict[str, float]:
    return {"lengths": float((prediction.predictions > 0).sum())}


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=256,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=list(range(1, 60)),
        initializer_factor=3.0,  # so that sentences differ
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.T5ForConditionalGeneration(config)


@on_ranks(4, timeout_s=120)
def test_a_parallelism_config_of_the_arguments_says_how_many_ranks_share_the_shards(rank: int, world_size: int) -> None:
    parallelism = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    with shared_folder() as folder:
        args = arguments(folder, max_steps=1)
        args.parallelism_config = parallelism
        its = Trainer(gpt2(), args, train_dataset=Texts(), **SHARDED)
        its.train()
        assert args.parallelism_config is parallelism, "the script's own"
        model = its.sharded_model
        assert {chunk.layout.world_size for chunk in model.chunk_manager.chunks} == {2}
        args.parallelism_config = ParallelismConfig(tp_size=2)
        with pytest.raises(UnsupportedError, match=r"parallelism_config= with tp_size=2 .* device_mesh=mesh"):
            Trainer(gpt2(), args)
        model.close()
