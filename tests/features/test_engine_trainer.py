"""`Trainer`: epochs, evaluation and hooks beside a loop by hand; ranks that end together."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gemini
from gemini import Engine, GeminiError, RemoteRankError, Trainer, state_hash
from gemini.engine.trainer import (
    Accuracy,
    Hook,
    JsonLines,
    LearningRate,
    Loss,
    Memory,
    TensorBoard,
    Throughput,
)
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, Mlp, build

CONFIG: dict[str, Any] = {
    "device": "emulated",
    "chunk_size": CHUNK_NUMEL,
    "rank_timeout": 60.0,
    "optimizer": {"type": "HybridAdam", "params": {"lr": 1e-2}},
}


def engine_of(criterion: Any = None, **config: Any) -> Engine:
    return gemini.initialize(build(), None, criterion or nn.MSELoss(), config={**CONFIG, **config}, verbose=False)[0]


def pairs(rank: int, number: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, WIDTH, generator=made), torch.randn(4, WIDTH, generator=made)) for _ in range(number)]


class Notes(Hook):
    """Writes down what it is told."""

    def __init__(self, priority: int = 50, name: str = "") -> None:
        self.priority, self.name, self.heard = priority, name, []  # type: ignore[var-annotated]

    def before_train(self, trainer: Trainer) -> None:
        self.heard.append("before_train")

    def after_step(self, trainer: Trainer) -> None:
        self.heard.append(f"step {trainer.engine.global_steps}")

    def after_epoch(self, trainer: Trainer) -> None:
        self.heard.append(f"epoch {trainer.epoch}")

    def after_test(self, trainer: Trainer) -> None:
        self.heard.append("test")

    def after_train(self, trainer: Trainer) -> None:
        self.heard.append("after_train")


@on_ranks(1, 2)
def test_a_trainer_trains_as_a_loop_by_hand(rank: int, world_size: int) -> None:
    engine, its = (engine_of(gradient_accumulation_steps=2, clip_grad_norm=0.1) for _ in range(2))
    Trainer(engine).fit(pairs(rank, 4), epochs=2)
    for _ in range(2):
        for data, label in pairs(rank, 4):
            its.backward(its.criterion(its(data), label))
            its.step()
    assert engine.global_steps == 4
    assert state_hash(engine.model) == state_hash(its.model)


def test_hooks_hear_of_a_training_in_a_stated_order() -> None:
    notes = Notes()
    Trainer(engine_of()).fit(pairs(0, 2), 3, test_dataloader=pairs(1, 1), test_interval=2, hooks=[notes])
    steps = [f"step {number}" for number in range(1, 7)]
    assert notes.heard == [
        "before_train",
        *(*steps[:2], "epoch 0"),
        *(*steps[2:4], "epoch 1", "test"),
        *(*steps[4:], "epoch 2", "test"),
        "after_train",
    ]


def test_hooks_of_a_smaller_priority_come_first() -> None:
    order: list[str] = []

    class Named(Notes):
        def after_step(self, trainer: Trainer) -> None:
            order.append(self.name)

    hooks = [Named(50, "b"), Named(10, "a"), Named(50, "c")]
    Trainer(engine_of()).fit(pairs(0, 1), 1, hooks=hooks)
    assert order == ["a", "b", "c"]


def test_training_ends_after_max_steps() -> None:
    engine = engine_of()
    Trainer(engine).fit(pairs(0, 4), epochs=5, max_steps=6)
    assert engine.global_steps == 6


@on_ranks(1, 2)
def test_metrics_are_those_of_all_ranks(rank: int, world_size: int) -> None:
    engine = engine_of()
    trainer = Trainer(engine)
    hooks = [Memory(), Throughput(), LearningRate(), Loss()]
    trainer.fit(pairs(rank, 3), 1, test_dataloader=pairs(rank, 2), hooks=hooks)
    with torch.no_grad():
        losses = [float(nn.MSELoss()(engine(data), label)) for data, label in pairs(rank, 2)]
        mean = trainer.sum_over_ranks(torch.tensor(losses, dtype=torch.float64).mean()) / world_size
    assert trainer.metrics["test_loss"] == pytest.approx(float(mean), rel=1e-12)
    assert trainer.metrics["lr"] == 1e-2
    assert trainer.metrics["samples_per_s"] > 0
    memory = engine.chunk_manager.memory
    assert trainer.metrics["device_bytes"] == memory.device.ledger.total_bytes > 0
    assert trainer.metrics["host_bytes"] == memory.host.ledger.total_bytes
    assert set(trainer.evaluate(pairs(rank, 1))) >= {"loss", "epoch_loss", "test_loss"}


class Reads(TorchDispatchMode):
    """Counts reads of numbers from tensors, for which the host waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_hooks_wait_for_the_device_when_a_metric_is_read() -> None:
    def reads_of(*hooks: Hook) -> int:
        trainer = Trainer(engine_of(nn.CrossEntropyLoss(), gradient_accumulation_steps=2))
        with Reads() as reads:
            labels = torch.zeros(4, dtype=torch.long)
            batches = [(data, labels) for data, _ in pairs(0, 8)]
            trainer.fit(batches, 2, hooks=hooks, test_dataloader=batches)
        if hooks:
            before = reads.count
            with reads:
                assert trainer.metrics["loss"] == trainer.metrics["loss"] > 0
            assert reads.count == before + 1
        return reads.count

    # loss and count of an epoch, of its evaluation, of its accuracy; and one loss that the test has read
    assert reads_of(Loss(), Accuracy()) - reads_of() <= 2 * 4 + 1


@on_ranks(1, 2)
def test_accuracy_counts_every_ranks_labels_but_ignored_ones(rank: int, world_size: int) -> None:
    engine = engine_of(nn.CrossEntropyLoss())
    data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        label = engine(data).argmax(-1)
    label[:2] = -100
    label[2] = (label[2] + 1) % WIDTH
    found = Trainer(engine).evaluate([(data, label)], hooks=[Accuracy()])
    assert found["test_accuracy"] == pytest.approx(5 / 6)


def test_model_flops_count_tokens() -> None:
    ticks = iter([0.0, 2.0, 4.0])
    throughput, trainer = Throughput(clock=lambda: next(ticks)), Trainer(engine_of())
    throughput.before_epoch(trainer)
    throughput.after_micro_batch(trainer, {"input_ids": torch.zeros(2, 5, dtype=torch.long)}, None)  # type: ignore[arg-type]
    throughput.after_step(trainer)
    num_parameters = sum(parameter.numel() for parameter in build().parameters())
    assert trainer.metrics["tokens_per_s"] == 5
    assert trainer.metrics["model_flops_per_s"] == 6 * num_parameters * 5
    assert trainer.metrics["samples_per_s"] == 1


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    trainer = Trainer(engine_of())
    for _ in range(2):
        trainer.fit(pairs(0, 2), 1, test_dataloader=pairs(1, 1), hooks=[Loss(), JsonLines(path)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "step", "epoch", "test"] * 2
    assert [line["step"] for line in lines] == [1, 2, 2, 2, 3, 4, 4, 4]
    assert all("loss" in line for line in lines)


def test_tensorboard_reads_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Trainer(engine_of()).fit(pairs(0, 3), 1, hooks=[TensorBoard(tmp_path), Loss()])  # written after it is measured
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [each.step for each in found.Scalars("loss")] == [1, 2, 3]


class Raises(Hook):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def after_step(self, trainer: Trainer) -> None:
        if trainer.engine.model.rank == self.rank:
            raise ValueError("the disk is full")


@on_ranks(1, 2)
def test_a_hook_that_raises_ends_all_ranks(rank: int, world_size: int) -> None:
    who = world_size - 1
    with pytest.raises(ValueError if rank == who else RemoteRankError, match="the disk is full"):
        Trainer(engine_of()).fit(pairs(rank, 3), 1, hooks=[Raises(who)])


class Signalled(Hook):
    """Gets a signal in the middle of a step."""

    def __init__(self, rank: int, number: signal.Signals) -> None:
        self.rank, self.number = rank, number

    def after_micro_batch(self, trainer: Trainer, batch: Any, outcome: Any) -> None:
        if trainer.engine.micro_steps == 2 and trainer.engine.model.rank == self.rank:
            os.kill(os.getpid(), self.number)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_one_rank_ends_all_after_the_step(rank: int, world_size: int, number: signal.Signals) -> None:
    engine, notes = engine_of(), Notes()
    before = signal.getsignal(number)
    trainer = Trainer(engine)
    trainer.fit(pairs(rank, 5), 3, test_dataloader=pairs(rank, 1), hooks=[notes, Signalled(world_size - 1, number)])
    assert engine.global_steps == 2
    assert notes.heard == ["before_train", "step 1", "step 2", "epoch 0", "after_train"]
    assert trainer.stopped_by == (number.name if rank == world_size - 1 else None)
    assert signal.getsignal(number) is before
    found = trainer.evaluate(pairs(rank, 2), hooks=[Loss()])  # it can go on
    assert found["test_loss"] > 0
    trainer.fit(pairs(rank, 1), 1)
    assert engine.global_steps == 3
    assert trainer.stopped_by is None


@on_ranks(1, 2)
def test_the_last_window_of_a_training_is_stepped_though_it_is_not_full(rank: int, world_size: int) -> None:
    """Between two epochs it is filled: ten batches make three steps, of four, of four and of two."""
    engine, its = (engine_of(gradient_accumulation_steps=4) for _ in range(2))
    notes = Notes()
    Trainer(engine).fit(pairs(rank, 5), 2, hooks=[notes, Loss()])
    for data, label in pairs(rank, 5) + pairs(rank, 5):
        its.backward(its.criterion(its(data), label))
        its.step()
    assert its.is_window_open()
    its.step(last=True)
    assert notes.heard == ["before_train", "step 1", "epoch 0", "step 2", "step 3", "epoch 1", "after_train"]
    assert state_hash(engine.model) == state_hash(its.model)
    assert not engine.is_window_open()


@on_ranks(1, 2)
def test_a_signal_in_the_middle_of_a_window_ends_training_after_its_step(rank: int, world_size: int) -> None:
    """Its first micro-batches are in a step, and what goes on begins with a window of its own."""
    engine = engine_of(gradient_accumulation_steps=4)
    Trainer(engine).fit(pairs(rank, 12), 1, hooks=[Signalled(world_size - 1, signal.SIGTERM)])  # in the second of four
    assert (engine.global_steps, engine.micro_steps, engine.is_window_open()) == (1, 4, False)


@on_ranks(2)
def test_an_epoch_ends_where_the_shortest_ranks_loader_does(rank: int, world_size: int) -> None:
    engine = engine_of()
    Trainer(engine).fit(pairs(rank, 5 - 2 * rank), 2)
    assert engine.global_steps == 6


@on_ranks(1, 2)
def test_an_empty_loader_is_said_on_every_rank(rank: int, world_size: int) -> None:
    loader = [] if rank == world_size - 1 else pairs(rank, 2)
    with pytest.raises(GeminiError, match="training loader of a rank is empty"):
        Trainer(engine_of()).fit(loader, 1)
    with pytest.raises(GeminiError, match="test loader of a rank is empty"):
        Trainer(engine_of()).evaluate(loader)


def test_a_progress_bar_shows_steps_and_metrics(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a narrow terminal too: nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    hooks = [Loss(), LearningRate(), Throughput()]
    Trainer(engine_of()).fit(pairs(0, 3), 2, test_dataloader=pairs(0, 1), hooks=hooks, display_progress=True)
    shown = capfd.readouterr().out
    assert "train" in shown
    assert "6/6" in shown
    assert [name for name in ("loss", "lr", "samples_per_s", "epoch_loss", "test_loss") if name not in shown] == []
    assert "…" not in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_a_bar_with_loss_and_memory_without_any_hook(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    capfd.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    Trainer(engine_of()).fit(pairs(0, 3), 2, test_dataloader=pairs(0, 1))
    shown = capfd.readouterr().out
    if terminal:
        assert "6/6" in shown and re.search(r"loss \d.*device [\d.]+ [KM]?i?B", shown, re.DOTALL), shown
    else:
        assert shown == ""


def test_predictions_are_the_models_in_evaluation() -> None:
    engine = engine_of()
    data = pairs(0, 1)[0][0]
    assert torch.equal(Trainer(engine).predict(data), build()(data).detach())
    assert engine.model.training


class Named(Mlp):
    """Takes a mapping and returns its loss, as Hugging Face's models do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        output = super().forward(x)
        return {"logits": output} if labels is None else {"logits": output, "loss": (output - labels).square().mean()}


def test_a_model_may_make_its_loss_itself() -> None:
    engine = gemini.initialize(build(Named), config=CONFIG, verbose=False)[0]
    trainer = Trainer(engine)
    trainer.fit([{"x": data, "labels": label} for data, label in pairs(0, 2)], 1, hooks=[Loss()])
    assert engine.global_steps == 2
    assert trainer.metrics["loss"] > 0
    with pytest.raises(GeminiError, match="returned no loss"):
        trainer.fit([{"x": data} for data, _ in pairs(0, 1)], 1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"epochs": 0}, ValueError, "epochs must be an integer of at least 1"),
        ({"epochs": 1, "max_steps": 0}, ValueError, "max_steps must be"),
        ({"epochs": 1, "test_interval": 1.5}, ValueError, "test_interval must be"),
    ],
    ids=str,
)
def test_numbers_that_are_not_valid_are_named(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Trainer(engine_of()).fit(pairs(0, 1), **arguments)


def test_a_trainer_takes_an_engine_only() -> None:
    with pytest.raises(TypeError, match="make one with initialize"):
        Trainer(build())  # type: ignore[arg-type]


def test_a_batch_of_another_kind_is_named() -> None:
    with pytest.raises(TypeError, match="a batch is a mapping, or a pair of data and label, found Tensor"):
        Trainer(engine_of()).fit([torch.ones(1, WIDTH)], 1)
