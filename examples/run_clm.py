"""The well-known run_clm with one line changed: `transformers.Trainer` trains a language model sharded under a budget.

    python examples/run_clm.py --output_dir out                   # a third of the state on the device
    torchrun --nproc-per-node 2 examples/run_clm.py --output_dir out --model_data_memory 10MiB
    torchrun --nproc-per-node 2 examples/run_clm.py --output_dir out --sharding ds.json   # or a config in our keys
    python examples/run_clm.py --output_dir out --plain                                   # without gemini

All flags of TrainingArguments are flags here, such as --bf16, --save_steps 50 and
--resume_from_checkpoint out/checkpoint-50; without --max_steps there are 60, and a line for every fifth.
On a machine without a GPU add --use_cpu.
Nothing is downloaded: the text is --train_file, or the source of Python's standard library; the tokenizer is trained on
it, and the model has random weights, in the shape of --config_overrides. The line that differs from a script for the
plain Trainer is its import; what the model is sharded by are arguments of `Trainer(...)`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from budget import a_third
from torch import Tensor
from torch.utils.data import Dataset
from train_gpt import END_OF_FILE, standard_library_source, train_tokenizer

from gemini.integrations.transformers import Trainer  # the one line; plain is: from transformers import Trainer


def flag(text: str, default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class ModelArguments:
    """The model."""

    model_type: str = flag("A causal language model of transformers: llama, gpt2, ...", "llama")
    config_overrides: str = flag(
        "Fields of its config.",
        "hidden_size=128,intermediate_size=384,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=4",
    )


@dataclasses.dataclass
class DataArguments:
    """The text."""

    train_file: str | None = flag("A file of text. None: *.py of the standard library.")
    max_text_bytes: int = flag("How much of it is read.", 2_000_000)
    vocabulary: int = flag("Tokens of the byte-level BPE that is trained on it.", 1024)
    block_size: int = flag("Tokens of a sample.", 128)
    validation_split_percentage: int = flag("Percent of the samples that are held out.", 5)


@dataclasses.dataclass
class ShardingArguments:
    """What `Trainer` is told beside TrainingArguments. Without a budget, a third of the state is on the device."""

    sharding: str | None = flag("A config: a DeepSpeed JSON with its 'auto', or a file in gemini's keys.")
    stage: int | None = flag("3 shards parameters, gradients and optimizer state, 2 the last two, 1 the last. None: 3.")
    device_memory: str | None = flag("What this process may hold on its device, such as 8GiB. None: what is free.")
    model_data_memory: str | None = flag("What of it the model's state may take, such as 10MiB. None of both: a third.")
    plain: bool = flag("Train by the Trainer of transformers itself, to compare.", False)


class Blocks(Dataset[dict[str, Tensor]]):
    """Samples of equal length."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens  # (samples, block_size)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


def main(argv: Sequence[str] | None = None) -> Any:
    """Train, evaluate and save as the flags say. Returns the Trainer. Collective."""
    kinds = (ModelArguments, DataArguments, ShardingArguments, transformers.TrainingArguments)
    parser = transformers.HfArgumentParser(kinds, description=(__doc__ or "").splitlines()[0])
    parser.set_defaults(max_steps=60, logging_steps=5)  # so that a first try ends, and shows losses meanwhile
    model_args, data_args, sharding, args = parser.parse_args_into_dataclasses(argv)
    transformers.set_seed(args.seed)

    tokenizer, text = tokenizer_and_text(data_args, args)
    train, held_out = samples(tokenizer, text, data_args)
    model = build(model_args, tokenizer)

    collator = transformers.default_data_collator  # that of a tokenizer pads, and blocks need none
    data = {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer, "data_collator": collator}
    if sharding.plain:
        trainer: Any = transformers.Trainer(model, args, **data)
    else:
        budgets = {name: getattr(sharding, name) for name in ("stage", "device_memory", "model_data_memory")}
        given = {name: value for name, value in budgets.items() if value is not None}
        if sharding.sharding is None and given.keys() <= {"stage"}:
            dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
            given["model_data_memory"] = a_third(model, args.world_size, dtype=dtype, **given)
        trainer = Trainer(model, args, **data, config=sharding.sharding, **given)

    if args.do_train or not args.do_eval:
        done = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        say(trainer, done.metrics, data_args.block_size)
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(100.0, metrics["eval_loss"]))
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.save_state()
    if trainer.is_world_process_zero() and not sharding.plain:
        print(trainer.sharded_model.memory_report())
    return trainer


def say(trainer: Any, metrics: dict[str, float], block_size: int) -> None:
    """Print on rank 0 what came of the training. Local."""
    args, losses = trainer.args, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if not trainer.is_world_process_zero():
        return
    if losses:
        print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {trainer.state.global_step} steps")
    tokens_per_s = metrics["train_samples_per_second"] * block_size
    print(f"speed: {tokens_per_s:.0f} tokens/s on {args.world_size} rank{'s' * (args.world_size > 1)}")


def tokenizer_and_text(data: DataArguments, args: transformers.TrainingArguments) -> tuple[Any, str]:
    """A tokenizer that is trained once, by rank 0, and lies in the output folder from then on. Collective."""
    if data.train_file is None:
        texts = standard_library_source(data.max_text_bytes)
    else:
        texts = [Path(data.train_file).read_bytes()[: data.max_text_bytes].decode("utf-8", errors="ignore")]
    saved = os.path.join(args.output_dir, "tokenizer")
    with args.main_process_first(local=False, desc="the tokenizer"):
        if not os.path.isdir(saved):
            trained = train_tokenizer(texts, data.vocabulary)
            made = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END_OF_FILE)
            made.save_pretrained(saved)
    return transformers.AutoTokenizer.from_pretrained(saved), END_OF_FILE.join(texts)


def samples(tokenizer: Any, text: str, data: DataArguments) -> tuple[Blocks, Blocks]:
    """The text in blocks, the last of which are held out. A rest that fills no block is left out."""
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    blocks = tokens[: len(tokens) // data.block_size * data.block_size].view(-1, data.block_size)
    num_held_out = max(1, len(blocks) * data.validation_split_percentage // 100)
    if len(blocks) <= num_held_out:
        raise ValueError(f"{len(tokens)} tokens make {len(blocks)} blocks of {data.block_size}: give more text")
    return Blocks(blocks[:-num_held_out]), Blocks(blocks[-num_held_out:])


def build(given: ModelArguments, tokenizer: Any) -> Any:
    """A model with random weights, the same on every rank."""
    config = transformers.AutoConfig.for_model(given.model_type)
    if given.config_overrides:
        config.update_from_string(given.config_overrides)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config.update({"vocab_size": len(tokenizer), **ends})
    return transformers.AutoModelForCausalLM.from_config(config)


if __name__ == "__main__":
    its = main(sys.argv[1:])
    its.accelerator.wait_for_everyone()
    its.end()
