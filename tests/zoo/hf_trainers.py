"""Small trainings by `transformers.Trainer`, ours and the plain one, and the same by hand."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.data import Dataset

from gemini import ShardedModel, ShardedOptimizer
from gemini.integrations.transformers import ShardedTraining, Trainer
from optim import HybridAdam
from tests.zoo.hf_models import VOCAB

CHUNK_NUMEL = 4096
SHARDED: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "model_data_memory": "300KiB"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Losses = list[float]


class Texts(Dataset[dict[str, Tensor]]):
    """24 texts of 16 tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, VOCAB, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def gpt2(dropout: float = 0.0) -> Any:
    """With tied embeddings; the same weights on every call."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)


def arguments(folder: str | Path, kind: Any = transformers.TrainingArguments, **more: Any) -> Any:
    """Four steps of two micro-batches, clipped, with weight decay and a schedule."""
    given = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return kind(str(folder), **{**given, **more})


def flags_of(dtype: str) -> dict[str, bool]:
    """TrainingArguments that say it."""
    return {} if dtype == "fp32" else {dtype: True}


def trainer(folder: str | Path, model: Any = None, kind: Any = Trainer, sharded: Any = None, **more: Any) -> Any:
    """A Trainer of `kind`, with TrainingArguments that are changed by `more`. sharded: our arguments."""
    ours = (SHARDED if sharded is None else sharded) if issubclass(kind, ShardedTraining) else {}
    generates = issubclass(kind, transformers.Seq2SeqTrainer)
    its = {name: more.pop(name) for name in KEPT if name in more}
    args = arguments(
        folder, transformers.Seq2SeqTrainingArguments if generates else transformers.TrainingArguments, **more
    )
    given = {"train_dataset": Texts(), "eval_dataset": Texts(), **its, **ours}
    return kind(model if "model_init" in its else (model or gpt2()), args, **given)


KEPT = (
    "model_init",
    "callbacks",
    "compute_metrics",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "processing_class",
    "train_dataset",
    "eval_dataset",
)


def logged(trainer: Any, name: str = "loss") -> Losses:
    """What a training has logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Recorded:
    """The micro-batches that a model is trained with, as keyword arguments."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.batches: list[dict[str, Any]] = []
        model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.batches.append(kwargs)


def by_hand(
    batches: list[dict[str, Any]], rates: list[float], dtype: torch.dtype | None, kind: Any = HybridAdam
) -> tuple[ShardedModel, ShardedOptimizer, Losses, Losses]:
    """The training that `arguments` describe, in the low-level API: model, optimizer, losses and norms of each step."""
    model = ShardedModel(gpt2(), dtype=dtype, **SHARDED)
    named = list(model.named_parameters())
    decayed = [parameter for name, parameter in named if parameter.dim() > 1]
    rest = [parameter for name, parameter in named if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = ShardedOptimizer(model, kind(groups, lr=1e-2), clip_grad_norm=0.5)
    losses, norms = [], []
    for step, rate in enumerate(rates):
        total = torch.tensor(0.0)
        for batch in batches[2 * step : 2 * step + 2]:
            loss = model(**batch).loss * model.world_size  # the Trainer divides by the tokens of all ranks
            optimizer.backward(loss)
            total += loss.detach()
        if model.world_size > 1:
            dist.all_reduce(total)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(float(total / model.world_size))
        assert optimizer.grad_norm is not None
        norms.append(float(optimizer.grad_norm))
    return model, optimizer, losses, norms


@contextlib.contextmanager
def on_a_machine_without_gpus() -> Iterator[None]:
    """Inside, Accelerate finds out anew where it runs, and finds no GPU; afterwards it finds out once more."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with patch("torch.cuda.is_available", return_value=False):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
