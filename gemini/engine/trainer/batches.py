"""From a batch to outputs, labels and a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemini.engine.engine import Engine
from gemini.model.tensors import map_tensors, tensors_in


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
