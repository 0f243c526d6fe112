"""examples/run_clm.py as a user runs it, on two ranks with a third of the memory, beside the same training by hand."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from gemini import HybridAdam, ShardedModel, ShardedOptimizer
from tests.harness.ranks import RankPool
from tests.test_examples import ROOT, run_on_ranks
from tests.zoo.mlp import assert_same

STEPS = 4
WIDE = "hidden_size=32,intermediate_size=64,num_hidden_layers=6,num_attention_heads=2,num_key_value_heads=2"
FLAGS = [
    *("--use_cpu", "--max_steps", str(STEPS), "--logging_steps", "1", "--save_steps", "2", "--learning_rate", "1e-2"),
    *("--max_text_bytes", "65536", "--vocabulary", "300", "--block_size", "32", "--config_overrides", WIDE),
    *("--do_train", "--disable_tqdm", "true", "--report_to", "none", "--per_device_train_batch_size", "4"),
]
STATE_BYTES = 16  # of a parameter in fp32: itself, its gradient and two moments
BUDGET = "160KiB"


def script() -> ModuleType:
    path = ROOT / "examples" / "run_clm.py"
    sys.path.insert(0, str(path.parent))  # as Python does for a script; it takes its text from another example
    try:
        spec = importlib.util.spec_from_file_location("run_clm", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["run_clm"] = module  # dataclasses look themselves up there
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def logged(folder: str) -> list[float]:
    state = json.loads(Path(folder, "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def by_hand(rank: int, world_size: int, folder: str) -> None:
    """Data, model and tokenizer of the script; loop, model and optimizer in the low-level API."""
    example = script()
    given = example.DataArguments(max_text_bytes=65536, vocabulary=300, block_size=32)
    args = transformers.TrainingArguments(folder, use_cpu=True)
    transformers.set_seed(args.seed)
    tokenizer, text = example.tokenizer_and_text(given, args)
    train, _ = example.samples(tokenizer, text, given)
    module = example.build(example.ModelArguments(config_overrides=WIDE), tokenizer)
    num_bytes = STATE_BYTES * sum(parameter.numel() for parameter in module.parameters()) / world_size
    model = ShardedModel(module, model_data_memory=BUDGET)
    budget = model.plan.budget_bytes
    assert budget is not None and budget < num_bytes / 3
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    shuffled = DataLoader(train, batch_size=4, shuffle=True, collate_fn=transformers.default_data_collator)
    sharing = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
    loader = accelerate.Accelerator(cpu=True, dataloader_config=sharing).prepare(shuffled)
    losses = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        optimizer.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world_size)
    assert losses == logged(folder), (losses, logged(folder))
    saved = load_file(Path(folder, "model.safetensors"))
    state = model.state_dict()
    assert_same({name: state[name] for name in saved}, saved)
    model.close()


def again(rank: int, world_size: int, folder: str, *flags: str) -> list[float]:
    """What the script logs with other flags, and the same text."""
    transformers.utils.logging.disable_progress_bar()
    trainer: Any = script().main(["--output_dir", folder, *FLAGS, *flags])
    dist.barrier()
    if "--plain" not in flags:
        trainer.sharded_model.close()
    return logged(folder)


def test_run_clm_without_a_budget_has_a_third_of_its_state_on_the_device_and_says_how_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer: Any = script().main(["--output_dir", str(tmp_path), *FLAGS, "--max_steps", "10"])
    plan = trainer.sharded_model.plan
    state_bytes = STATE_BYTES * sum(parameter.numel() for parameter in trainer.model.parameters())
    assert plan.budget_bytes is not None and plan.budget_bytes < 0.35 * state_bytes  # chunks have padding
    said = capsys.readouterr()
    assert re.search(r"^loss: [\d.]+ at first, [\d.]+ after 10 steps$", said.out, re.MULTILINE), said.out
    assert re.search(r"^speed: \d+ tokens/s on 1 rank$", said.out, re.MULTILINE), said.out
    assert re.search(r"[1-9]\d* fetches, .* [1-9]\d* evictions", said.out), said.out
    trainer.end()


@pytest.mark.soak
@pytest.mark.ranks
def test_run_clm_trains_under_a_third_of_the_state_as_the_same_loop_by_hand(ranks: RankPool, tmp_path: Path) -> None:
    """Its losses and weights have the bits of the low-level API; resuming has those of the run that went on."""
    folder = str(tmp_path)
    done = run_on_ranks("run_clm.py", "--output_dir", folder, *FLAGS, "--do_eval", "--model_data_memory", BUDGET)
    losses = logged(folder)
    assert len(losses) == STEPS and len(set(losses)) == STEPS
    assert f"model data budget {BUDGET[:-3]} KiB" in done.stdout
    assert json.loads((tmp_path / "eval_results.json").read_text())["perplexity"] < 300
    weights = load_file(tmp_path / "model.safetensors")
    ranks(2).run(by_hand, folder)
    two = f"{folder}/checkpoint-2"
    assert ranks(2).run(again, folder, "--model_data_memory", BUDGET, "--resume_from_checkpoint", two)[0] == losses
    assert_same(load_file(tmp_path / "model.safetensors"), weights)
    plain = ranks(2).run(again, folder, "--plain")[0]
    assert plain == pytest.approx(losses, rel=1e-4)  # torch's fused AdamW and DDP's sums round otherwise
