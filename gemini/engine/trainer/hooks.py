"""Hooks of the Trainer, its batches, and the metrics that it keeps and writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gemini.engine.engine import Engine
from gemini.engine.step_log import JsonLinesFile, MetricFile, TensorBoardFile
from gemini.model.operators import map_tensors, tensors_in

if TYPE_CHECKING:
    from gemini.engine.trainer.trainer import Trainer


# -- From a batch to outputs, labels and a loss.


class Outcome(NamedTuple):
    """What the forward of one micro-batch gave."""

    output: Any
    label: Any  # None where the model makes its loss itself
    loss: Tensor | None


def run(engine: Engine, batch: Any) -> Outcome:
    """Run the forward of one micro-batch. Collective.

    A mapping is given by keyword, and its loss is `output.loss`, as Hugging Face's models do it. Anything else is a
    pair of data and label for the engine's criterion.

    Raises TypeError for a batch of another kind.
    """
    batch = moved(batch, engine.device)
    # A tokenizer's `BatchEncoding` and a collator's dict are mappings. `labels` is the name that transformers' models
    # have.
    if isinstance(batch, Mapping):
        output = engine(**batch)
        return Outcome(output, batch.get("labels"), loss_in(output))
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise TypeError(f"a batch is a mapping, or a pair of data and label, found {type(batch).__name__}")
    data, label = batch
    output = forward(engine, data)
    return Outcome(output, label, engine.criterion(output, label))


def forward(engine: Engine, data: Any) -> Any:
    """The model's output for data without a label. Collective."""
    if isinstance(data, Mapping):
        return engine(**data)
    return engine(*data) if isinstance(data, (tuple, list)) else engine(data)


def loss_in(output: Any) -> Tensor | None:
    """The loss that a model has made itself."""
    # transformers' `ModelOutput` is a mapping. A dataclass or named tuple of the script's has an attribute.
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def moved(batch: Any, device: torch.device) -> Any:
    """All tensors of a batch on the model's device."""
    # From pinned memory the copy does not hold up the host. Kernels that read it come behind it in the same stream.
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def num_samples(batch: Any) -> int:
    """The first dimension of the first tensor; 0 without one."""
    # A tensor without dimensions is not the batch: a mapping may also have a number in it.
    first = next((tensor for tensor in tensors_in(batch) if tensor.dim()), None)
    return 0 if first is None else first.shape[0]


def num_tokens(batch: Any) -> int:
    """The number of tokens: of `input_ids` in a mapping, or of integer data; 0 where a batch has no tokens."""
    # Integer data of a pair count as token ids. Images and other features are floating-point and have no tokens.
    data = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0]
    if not isinstance(data, Tensor) or data.is_floating_point():
        return 0
    return data.numel()


# -- What a hook of a `Trainer` is told.


class Hook:
    """A hook is called at points of a `Trainer`'s loop, after hooks of a smaller `priority`, equals in the order given.

    Override what is needed. What a hook raises ends the training on every rank. A hook that makes collectives makes
    them on every rank. All methods are called on every rank.
    """

    priority = 50
    """Metrics that are measured have 0 to 49, those who write them 50 and more."""

    def before_train(self, trainer: Trainer) -> None:
        """Called before the first epoch."""

    def before_epoch(self, trainer: Trainer) -> None:
        """Called before an epoch's first micro-batch."""

    def after_micro_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        """Called after a backward, before a step."""

    def after_step(self, trainer: Trainer) -> None:
        """Called after an optimizer step, also one that was skipped."""

    def after_epoch(self, trainer: Trainer) -> None:
        """Called after an epoch's last step, before its evaluation."""

    def before_test(self, trainer: Trainer) -> None:
        """Called before an evaluation's first forward."""

    def after_test_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        """Called after a forward of an evaluation."""

    def after_test(self, trainer: Trainer) -> None:
        """Called after an evaluation."""

    def after_train(self, trainer: Trainer) -> None:
        """Called when the training ends, also by a signal; not after an exception."""


# -- Hooks that measure: each puts its numbers into `trainer.metrics` after a step, by name.
#
# Sums over ranks are made once an epoch or evaluation; what is put there after a step is this rank's.


class Metrics(MutableMapping[str, float]):
    """Numbers by name. One that is given as a tensor stays where it is until somebody reads it."""

    def __init__(self) -> None:
        self._values: dict[str, float | Tensor] = {}

    def __getitem__(self, name: str) -> float:
        # The number replaces the tensor, so that the host waits for the device once per value, however many hooks read.
        value = self._values[name] = float(self._values[name])
        return value

    def __setitem__(self, name: str, value: float | Tensor) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


class Mean:
    """A mean over all ranks' samples. Sums of tensors are made where the tensors are: nobody waits for the device."""

    def __init__(self) -> None:
        self._sum: float | Tensor = 0.0
        self._count: int | Tensor = 0

    def clear(self) -> None:
        """Begin again, as after a training that failed before its sums were used."""
        self._sum, self._count = 0.0, 0

    def add(self, total: float | Tensor, count: int | Tensor) -> None:
        self._sum, self._count = self._sum + total, self._count + count

    def pop_mean(self, trainer: Trainer) -> float:
        """The mean of what was added on all ranks since the last call; nan of nothing. Collective."""
        # The host waits for the device here, once an epoch or evaluation. In fp64 counts are exact up to 2**53.
        sum_and_count = torch.tensor([float(self._sum), float(self._count)], dtype=torch.float64, device="cpu")
        self.clear()
        # Sums and counts are added, not means: ranks may have different numbers of samples.
        total, count = trainer.sum_over_ranks(sum_and_count).tolist()
        return total / count if count else float("nan")


class Loss(Hook):
    """`loss`, the mean over the micro-batches of a step on this rank; `epoch_loss` and `test_loss` over all ranks."""

    priority = 0

    def __init__(self) -> None:
        self._of_step: list[Tensor] = []
        self._of_epoch, self._of_test = Mean(), Mean()

    def before_train(self, trainer: Trainer) -> None:
        self._of_step.clear()
        self._of_epoch.clear()

    def after_micro_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        # `Window` refuses a model that returns no loss before hooks hear of the micro-batch.
        assert outcome.loss is not None
        # Sums are in fp64: the loss's own dtype would round away what the later micro-batches of an epoch add.
        loss = outcome.loss.detach().double()
        self._of_step.append(loss)
        # A loss is the mean of its micro-batch. A last batch that is not full counts by its samples in the epoch's
        # mean.
        self._of_epoch.add(loss * num_samples(batch), num_samples(batch))

    def after_step(self, trainer: Trainer) -> None:
        # The tensor stays on the device: who reads the metric waits for it, and a step that nobody shows does not.
        trainer.metrics["loss"] = sum(self._of_step) / len(self._of_step)
        self._of_step.clear()

    def after_epoch(self, trainer: Trainer) -> None:
        trainer.metrics["epoch_loss"] = self._of_epoch.pop_mean(trainer)

    def before_test(self, trainer: Trainer) -> None:
        self._of_test.clear()

    def after_test_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        if outcome.loss is not None:
            self._of_test.add(outcome.loss.double() * num_samples(batch), num_samples(batch))

    def after_test(self, trainer: Trainer) -> None:
        trainer.metrics["test_loss"] = self._of_test.pop_mean(trainer)


class Accuracy(Hook):
    """`test_accuracy`, the part of labels that were predicted, over all ranks.

    predict: makes predictions of outputs, in the shape of labels. None: the largest of the last dimension. Labels below
    0 are not counted, as in cross entropy with `ignore_index=-100`.
    """

    priority = 1

    def __init__(self, predict: Callable[[Any], Tensor] | None = None) -> None:
        self._predict = predict or (lambda output: output.argmax(-1))
        self._of_test = Mean()

    def before_test(self, trainer: Trainer) -> None:
        self._of_test.clear()

    def after_test_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        # Both counts stay on the device until the evaluation is over.
        counts = outcome.label >= 0
        right = (self._predict(outcome.output) == outcome.label) & counts
        self._of_test.add(right.sum(), counts.sum())

    def after_test(self, trainer: Trainer) -> None:
        trainer.metrics["test_accuracy"] = self._of_test.pop_mean(trainer)


class LearningRate(Hook):
    """`lr`, of the first param group, as the step used it."""

    priority = 2

    def __init__(self) -> None:
        self._rate = 0.0

    def after_micro_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        # The rate is read before the step, which moves the schedule: afterwards it is that of the next step.
        self._rate = trainer.optimizer.param_groups[0]["lr"]

    def after_step(self, trainer: Trainer) -> None:
        trainer.metrics["lr"] = self._rate


class Throughput(Hook):
    """`samples_per_s`, `tokens_per_s` and `model_flops_per_s`, of all ranks if they have batches of one size.

    Model FLOP/s are 6 per trained parameter and token (Kaplan et al. 2020, section 2.1), without attention, and without
    what activation checkpointing computes again.
    """

    priority = 3

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since, self._samples, self._tokens, self._parameters = 0.0, 0, 0, 0

    def before_epoch(self, trainer: Trainer) -> None:
        # The evaluation between two epochs is in no figure.
        self._since, self._samples, self._tokens = self._clock(), 0, 0
        self._parameters = sum(each.numel() for each in trainer.engine.model.parameters() if each.requires_grad)

    def after_micro_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        self._samples += num_samples(batch)
        self._tokens += num_tokens(batch)

    def after_step(self, trainer: Trainer) -> None:
        now = self._clock()
        # No synchronization is needed for the host's clock: a step reads the sums of its gradients from the device, so
        # all forwards and backwards of the step are over. Only its update may still run.
        per_s = trainer.engine.model.world_size / max(now - self._since, 1e-9)
        trainer.metrics["samples_per_s"] = self._samples * per_s
        if self._tokens:
            trainer.metrics["tokens_per_s"] = self._tokens * per_s
            trainer.metrics["model_flops_per_s"] = 6 * self._parameters * self._tokens * per_s
        self._since, self._samples, self._tokens = now, 0, 0


class Memory(Hook):
    """`device_bytes` and `host_bytes`: what this rank holds of the model's state on each tier."""

    priority = 4

    def after_step(self, trainer: Trainer) -> None:
        # These are counts that the ledgers keep on the host, not the allocator's, which would include activations.
        memory = trainer.engine.chunk_manager.memory
        trainer.metrics["device_bytes"] = memory.device.ledger.total_bytes
        trainer.metrics["host_bytes"] = memory.host.ledger.total_bytes


# -- Hooks that write metrics: to files of rank 0, through TensorBoard's library or as lines of JSON.


class _Writes(Hook):
    """Writes after steps, epochs and evaluations, on rank 0."""

    kind: type[JsonLinesFile | TensorBoardFile]

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._file: MetricFile | None = None
        self._last: dict[str, float] = {}  # metrics as they were written last

    def before_train(self, trainer: Trainer) -> None:
        # Only rank 0 has a file, so the other ranks write nothing and read no metric, for which they would wait.
        if trainer.engine.model.rank == 0:
            self._file = self.kind(self._path)

    def after_step(self, trainer: Trainer) -> None:
        self._write(trainer, "step")

    def after_epoch(self, trainer: Trainer) -> None:
        self._write(trainer, "epoch")

    def after_test(self, trainer: Trainer) -> None:
        self._write(trainer, "test")

    def after_train(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, trainer: Trainer, event: str) -> None:
        if self._file is not None:
            # This reads every metric, so rank 0 waits for the device here. All are measured by then, because writers
            # have larger priorities.
            self._file.write(event, trainer.engine.global_steps, trainer.epoch, trainer.metrics)
            self._last = dict(trainer.metrics)


class JsonLines(_Writes):
    """One line per optimizer step, epoch and evaluation: {"event": "step", "step": 3, "epoch": 0, "loss": ...}.

    path: a file, which is added to; its folder is made. A step's line is there when the step is over.
    """

    priority = 60
    kind = JsonLinesFile


class TensorBoard(_Writes):
    """Scalars of every metric, by optimizer step. Needs the package tensorboard.

    path: a folder for event files. Raises ImportError, with what to install, when the training begins.
    """

    priority = 61
    kind = TensorBoardFile

    def after_epoch(self, trainer: Trainer) -> None:
        """Do nothing: what an epoch adds is written with its evaluation, with the next step, or at the end."""

    def after_train(self, trainer: Trainer) -> None:
        # What the last epoch added, such as its mean loss; the rest was written with its last step. Metrics that have
        # not changed would be written for the same step twice, and TensorBoard would show both values.
        new = {name: value for name, value in trainer.metrics.items() if self._last.get(name) != value}
        if self._file is not None and new:
            self._file.write("epoch", trainer.engine.global_steps, trainer.epoch, new)
        super().after_train(trainer)
