"""Engines and trainers at the edges: failed trainings, loaders without a length, ambiguous configs, wrapped models."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

import gemini
from gemini import Engine, GeminiError, ShardedModel, Trainer, deepspeed
from gemini.engine.initialize import whole_windows
from gemini.engine.trainer import Hook, JsonLines, Loss, LRSchedulerHook
from gemini.engine.trainer.trainer import Trainer as AnyTrainer
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, build, inputs, weights_of


def engine_of(**config: Any) -> Engine:
    config = {"device": "emulated", "chunk_size": CHUNK_NUMEL, **config}
    engine, *_ = gemini.initialize(
        build(), lambda its: torch.optim.SGD(its, lr=0.1), nn.MSELoss(), config=config, verbose=False
    )
    return engine


BATCH = inputs(0), inputs(1)


class FailsOnce(Hook):
    def after_micro_batch(self, trainer: AnyTrainer, batch: Any, outcome: Any) -> None:
        raise RuntimeError("once")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_training_after_one_that_failed_has_none_of_its_gradients(accumulation: int) -> None:
    found = []
    for fails in (True, False):
        engine = engine_of(gradient_accumulation_steps=accumulation)
        if fails:
            with pytest.raises(RuntimeError, match="once"):
                Trainer(engine).fit([BATCH] * 2, 1, hooks=[FailsOnce()])
        Trainer(engine).fit([BATCH] * 2, 1, hooks=[])
        found.append(weights_of(engine.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from [(x, y) for x, y in zip(*BATCH, strict=True)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loader_without_a_length_is_trained_and_evaluated(accumulation: int) -> None:
    engine = engine_of(gradient_accumulation_steps=accumulation)
    trainer, loader = Trainer(engine), DataLoader(Endless(), batch_size=1)
    trainer.fit(loader, 1)
    assert engine.global_steps == -(-len(BATCH[0]) // accumulation)
    trainer.evaluate(loader)


class StopsInTest(Hook):
    def after_test(self, trainer: AnyTrainer) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_during_an_evaluation_begins_no_epoch() -> None:
    engine = engine_of()
    moved: list[int] = []

    class Counts(Hook):
        def before_epoch(self, trainer: AnyTrainer) -> None:
            moved.append(trainer.epoch)

    Trainer(engine).fit([BATCH], 3, test_dataloader=[BATCH], hooks=[StopsInTest(), Counts()])
    assert moved == [0]


def test_a_metric_that_is_no_number_is_null_in_a_line_of_json(tmp_path: Path) -> None:
    class Odd(Hook):
        priority = 1

        def after_step(self, trainer: AnyTrainer) -> None:
            trainer.metrics["odd"] = float("nan")

    path = tmp_path / "lines"
    Trainer(engine_of()).fit([BATCH], 1, hooks=[Odd(), JsonLines(path)])
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[0]["odd"] is None


def test_inputs_are_cast_to_the_dtype_of_a_model_that_was_wrapped_before() -> None:
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL)
    config = {"zero": {}}  # Colossal-AI's, whose weights are fp16
    engine, *_ = gemini.initialize(model, lambda its: HybridAdam(its, lr=1e-3), config=config, verbose=False)
    assert any(name == "dtype" for name, _ in engine.config.ignored)
    assert engine(torch.ones(1, WIDTH)).dtype is torch.float32


@pytest.mark.parametrize(
    "more", [{}, {"wall_clock_breakdown": False}, {"fp16": {"enabled": False}}], ids=["bare", "clock", "fp16"]
)
def test_deepspeeds_call_reads_its_own_keys_where_they_are_ours_too(more: dict[str, Any]) -> None:
    adam = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.5}}
    engine, *_ = deepspeed.initialize(model=build(), config={"train_batch_size": 4, "optimizer": adam, **more})
    assert engine.zero_optimization_stage() == 0
    assert engine.optimizer.param_groups[0]["adamw_mode"] is True


def test_a_schedule_by_epoch_moves_once_for_each_epoch_that_was_trained() -> None:
    engine = engine_of()
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
    hooks = [StopsInTest(), LRSchedulerHook(schedule, by_epoch=True)]
    Trainer(engine).fit([BATCH], 3, test_dataloader=[BATCH], hooks=hooks)
    assert schedule.last_epoch == 1


@pytest.mark.filterwarnings("ignore:step .* skipped")
@on_ranks(1, 2)
def test_after_too_many_skipped_steps_a_window_begins_with_its_first_micro_batch(rank: int, world_size: int) -> None:
    scale = {"initial_scale": 8.0, "min_scale": 8.0, "max_scale": 8.0}
    engine = engine_of(dtype="fp16", cast_inputs=True, gradient_accumulation_steps=2, loss_scale=scale)

    def micro_batch(factor: float) -> None:
        engine.backward(engine(BATCH[0]).float().square().mean() * factor)
        engine.step()

    state = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(state | {"loss_scale": state["loss_scale"] | {"num_skipped": 19}})
    micro_batch(float("inf"))
    with pytest.raises(GeminiError, match="20 steps in a row were skipped"):
        micro_batch(float("inf"))
    assert not engine.is_window_open()
    assert engine.global_steps == engine.skipped_steps == 1
    micro_batch(1.0)
    assert engine.global_steps == 1, "a window has two micro-batches"
    micro_batch(1.0)
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)


@pytest.mark.parametrize("fails", ["after_micro_batch", "after_test_batch"])
def test_metrics_after_a_training_that_failed_have_none_of_its_losses(fails: str) -> None:
    class FailsLate(Hook):
        pass

    def fail(self: Hook, *arguments: Any) -> None:
        raise RuntimeError("late")

    setattr(FailsLate, fails, fail)
    found, other = [], (BATCH[0], BATCH[1] * 100)
    for loss in (Loss(), Loss()):
        trainer = Trainer(engine_of(gradient_accumulation_steps=2))
        if not found:
            with pytest.raises(RuntimeError, match="late"):
                Trainer(engine_of()).fit([other], 1, test_dataloader=[other], hooks=[loss, FailsLate()])
        trainer.fit([BATCH] * 2, 1, test_dataloader=[BATCH], hooks=[loss])
        found.append(dict(trainer.metrics))
    assert found[0] == found[1]


def test_an_evaluation_inside_a_training_leaves_it_its_hooks() -> None:
    heard = []

    class Evaluates(Hook):
        def after_step(self, trainer: AnyTrainer) -> None:
            heard.append(trainer.evaluate([BATCH], hooks=[Loss()])["test_loss"])

    engine = engine_of()
    Trainer(engine).fit([BATCH] * 3, 1, hooks=[Evaluates()])
    assert len(set(heard)) == engine.global_steps == 3


@pytest.mark.parametrize("how", ["evaluate", "predict"])
def test_an_evaluation_leaves_every_module_the_mode_that_it_had(how: str) -> None:
    engine = engine_of()
    engine.train()
    engine.module.layers[2].eval()
    modes = [module.training for module in engine.model.modules()]
    trainer = Trainer(engine)
    trainer.evaluate([BATCH]) if how == "evaluate" else trainer.predict(BATCH[0])
    assert [module.training for module in engine.model.modules()] == modes
    assert not all(modes)


class Shuffles(Dataset[Any]):
    """A dataset that has to be told the epoch, and says which ones it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __len__(self) -> int:
        return len(BATCH[0])

    def __getitem__(self, number: int) -> Any:
        return BATCH[0][number], BATCH[1][number]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("in_batches", [False, True])
def test_whatever_orders_the_data_is_told_the_epoch(in_batches: bool, window: int) -> None:
    dataset = Shuffles()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0)
    by_batch = {"batch_sampler": BatchSampler(sampler, 4, False)}
    loader: Any = DataLoader(dataset, **by_batch) if in_batches else DataLoader(dataset, 4, sampler=sampler)
    Trainer(engine_of()).fit(whole_windows(loader, window), 3)
    assert sampler.epoch == 2
    assert dataset.told == [0, 1, 2]


def test_another_fit_goes_on_counting_epochs_so_that_no_shuffle_is_repeated() -> None:
    class Notes(Hook):
        def after_test(self, trainer: Any) -> None:
            tested.append(trainer.epoch)

    dataset, tested = Shuffles(), []
    trainer = Trainer(engine_of())
    for epochs, interval in ((1, 1), (3, 2)):
        trainer.fit(DataLoader(dataset, 4), epochs, test_dataloader=[BATCH], test_interval=interval, hooks=[Notes()])
    assert dataset.told == [0, 1, 2, 3]
    assert tested == [0, 2, 3], "counted in each call, as its test_interval says"
    Trainer(engine_of()).fit(DataLoader(dataset, 4), 1)
    assert dataset.told[-1] == 0


def test_a_loader_of_less_than_a_step_says_that_it_yields_nothing() -> None:
    with pytest.warns(UserWarning, match="3 micro-batches, fewer than the 4 of a step") as told:
        assert not list(whole_windows([BATCH] * 3, 4))
    assert told[0].filename == __file__
    assert not list(whole_windows([], 4))
