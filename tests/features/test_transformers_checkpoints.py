"""What `gemini.integrations.transformers.Trainer` writes and reads: checkpoints of Hugging Face's own kind, whole."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from gemini import CheckpointError, RemoteRankError, state_hash
from gemini.integrations.transformers import Trainer
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.shared_folder import shared_folder
from tests.zoo.hf_trainers import DTYPES, SHARDED, flags_of, gpt2, logged, trainer
from tests.zoo.mlp import assert_same, minimum_bytes, weights_of

PROMPTS: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "encoder_hidden_size": 64}


def smallest(model: nn.Module) -> dict[str, Any]:
    """The least memory in which the model trains, so that what was used last has left the device."""
    where = {"device": "emulated", "chunk_size": 512}
    return {**where, "model_data_memory": minimum_bytes(model, **where)}


@on_ranks_with("dtype", {1: ["fp32"], 2: ["bf16"]}, soak={1: list(DTYPES), 2: list(DTYPES)})
def test_a_resumed_training_has_the_bits_of_one_that_went_on(rank: int, world_size: int, dtype: str) -> None:
    """With dropout, so that random numbers count; the checkpoint is one of Hugging Face's."""
    with shared_folder() as folder:
        runs = []
        for checkpoint in (None, os.path.join(folder, "checkpoint-2")):
            each = trainer(folder, gpt2(dropout=0.1), save_strategy="steps", save_steps=2, **flags_of(dtype))
            each.train(resume_from_checkpoint=checkpoint)
            runs.append((state_hash(each.sharded_model, each.optimizer), logged(each), logged(each, "learning_rate")))
            each.sharded_model.close()
        assert runs[0] == runs[1]
        torn = Path(folder, "checkpoint-3")  # as a crash in the middle of a save leaves it
        each = trainer(folder, gpt2(dropout=0.1), save_strategy="steps", save_steps=2, **flags_of(dtype))
        if rank == 0:
            torn.mkdir()
            (torn / "model.safetensors").write_bytes(b"half")
            Path(folder, "checkpoint-4").rename(Path(folder, "later"))
        each.sharded_model.chunk_manager.communicator.wait_for_all("the folder is there")
        each.train(resume_from_checkpoint=True)
        assert state_hash(each.sharded_model, each.optimizer) == runs[0][0]
        each.sharded_model.close()
        files = {"config.json", "generation_config.json", "model.safetensors", "gemini", "scheduler.pt"}
        files |= {"trainer_state.json", "training_args.bin"}
        files |= {f"rng_state_{number}.pth" for number in range(2)} if world_size > 1 else {"rng_state.pth"}
        assert set(os.listdir(os.path.join(folder, "checkpoint-2"))) == files
        loaded = transformers.GPT2LMHeadModel.from_pretrained(os.path.join(folder, "checkpoint-4"))
        assert loaded.dtype == DTYPES[dtype]
        assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.parametrize(
    "kinds", [(transformers.Trainer, Trainer), (Trainer, transformers.Trainer)], ids=["to", "from"]
)
def test_a_training_goes_over_to_us_and_back_by_its_checkpoint(kinds: tuple[Any, Any], tmp_path: Path) -> None:
    before, after = kinds
    whole = {"sharded": {**SHARDED, "save_whole_state": True}} if before is Trainer else {}
    first = trainer(tmp_path, kind=before, save_strategy="steps", save_steps=2, **whole)
    first.train()
    second = trainer(tmp_path, kind=after)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(second) == pytest.approx(logged(first), rel=1e-4)  # two kernels of one AdamW, as above
    assert second.state.global_step == 4


@on_ranks(1, 2)
def test_the_best_model_is_loaded_at_the_end(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        each = trainer(
            folder,
            learning_rate=1.0,  # so that it only gets worse
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="best",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=False,
        )
        each.train()
        losses = logged(each, "eval_loss")
        assert min(losses) < losses[-1]
        best = load_file(os.path.join(each.state.best_model_checkpoint, "model.safetensors"))
        state = each.sharded_model.state_dict()
        assert_same({name: state[name] for name in best}, best)
        assert each.evaluate()["eval_loss"] == min(losses)
        each.sharded_model.close()


@on_ranks(1, 2)
def test_a_saved_model_is_whole_with_tied_weights_once(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        each = trainer(folder)
        each.train()
        each.save_model(os.path.join(folder, "saved"))
        saved = load_file(os.path.join(folder, "saved", "model.safetensors"))  # on return every rank finds it
        assert "lm_head.weight" not in saved
        loaded = transformers.GPT2LMHeadModel.from_pretrained(os.path.join(folder, "saved"))
        assert_same(dict(loaded.state_dict()), weights_of(each.sharded_model))
        each.sharded_model.close()


@on_ranks(1, 2)
def test_who_cannot_write_tells_every_rank(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        each = trainer(folder)
        each.train()
        taken = os.path.join(folder, "taken")
        if rank == 0:
            Path(taken).write_text("a file is where the folder would be")
        each.sharded_model.chunk_manager.communicator.wait_for_all("the file is there")
        with pytest.raises(OSError if rank == 0 else RemoteRankError, match="taken"):
            each.save_model(taken)
        each.save_model(os.path.join(folder, "free"))
        each.sharded_model.close()


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("scheduler.pt", FileNotFoundError, r"does not find .*scheduler\.pt"),
        ("model.safetensors", ValueError, "Can't find a valid checkpoint"),
        ("gemini", CheckpointError, "ranks 1 do not find"),
    ],
)
def test_a_rank_that_lacks_a_file_tells_every_rank(
    rank: int, world_size: int, name: str, error: type[Exception], words: str
) -> None:
    """Each rank has a folder of its own, as on hosts without a shared disk."""
    with shared_folder() as folder:
        each = trainer(folder, save_strategy="steps", save_steps=2)
        each.train()
        mine = Path(shutil.copytree(folder / "checkpoint-2", folder / str(rank)))
        if rank == 1:
            (mine / name).rename(mine / "elsewhere")
        again = trainer(folder)
        with pytest.raises(error if rank == 1 or error is CheckpointError else RemoteRankError, match=words):
            again.train(resume_from_checkpoint=str(mine))
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert state_hash(again.sharded_model, again.optimizer) == state_hash(each.sharded_model, each.optimizer)
        for one in (each, again):
            one.sharded_model.close()


@on_ranks(1, 2)
def test_adapters_are_trained_saved_and_resumed(rank: int, world_size: int) -> None:
    import peft

    with shared_folder() as folder:
        runs = []
        for checkpoint in (None, os.path.join(folder, "checkpoint-2")):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
                model = peft.get_peft_model(gpt2(), config)
            best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
            each = trainer(folder, model, save_strategy="steps", save_steps=2, **best)
            assert each.label_names == ["labels"]
            each.train(resume_from_checkpoint=checkpoint)
            runs.append((state_hash(each.sharded_model, each.optimizer), logged(each)))
            saved = load_file(os.path.join(folder, "checkpoint-4", "adapter_model.safetensors"))
            assert all("lora" in name for name in saved)
            weights = peft.get_peft_model_state_dict(each.model)
            assert_same({name: value.cpu() for name, value in weights.items()}, saved)
            each.sharded_model.close()
        assert runs[0] == runs[1]
        assert not [name for name in os.listdir(os.path.join(folder, "checkpoint-4")) if name == "model.safetensors"]


@on_ranks(1, 2)
def test_a_checkpoint_in_several_files_is_resumed(rank: int, world_size: int) -> None:
    """As transformers writes models above 50 GB."""
    with shared_folder() as folder:
        each = trainer(folder, save_strategy="steps", save_steps=2)
        each.train()
        wanted = state_hash(each.sharded_model, each.optimizer)
        checkpoint = os.path.join(folder, "checkpoint-2")
        if rank == 0:
            saved = transformers.GPT2LMHeadModel.from_pretrained(checkpoint)
            os.remove(os.path.join(checkpoint, "model.safetensors"))
            saved.save_pretrained(checkpoint, max_shard_size="40KB")
            index = json.loads(Path(checkpoint, "model.safetensors.index.json").read_text())
            assert len(set(index["weight_map"].values())) > 2
        each.sharded_model.chunk_manager.communicator.wait_for_all("the files are there")
        other = trainer(folder)
        other.train(resume_from_checkpoint=checkpoint)
        assert state_hash(other.sharded_model, other.optimizer) == wanted
        each.sharded_model.close()
        other.sharded_model.close()


@on_ranks(1, 2)
def test_adapters_are_saved_without_a_look_at_the_trunk(rank: int, world_size: int) -> None:
    import peft

    with shared_folder() as folder:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(gpt2(), config)
        each = trainer(folder, adapted, sharded=smallest(adapted))
        each.train()
        moved: set[int] = set()
        model = each.sharded_model
        model.observer.listen(lambda move: moved.add(move.chunk) if move.what != "evict" else None)
        each.save_model()
        names = [managed.name for chunk in model.chunk_manager.chunks for managed in chunk.parameters]
        its = [m.name for c in model.chunk_manager.chunks if c.index in moved for m in c.parameters]
        assert its and len(its) < len(names)
        assert not [name for name in its if "lora" not in name]
        model.close()


@on_ranks(1, 2)
def test_prompts_are_saved_as_their_encoder_makes_them(rank: int, world_size: int) -> None:
    """peft runs the encoder to save what it makes, with weights that ranks gather from each other."""
    import peft

    with shared_folder() as folder:
        model = peft.get_peft_model(gpt2(), peft.PromptEncoderConfig(**PROMPTS))
        each = trainer(folder, model, sharded=smallest(model))
        each.train()
        each.save_model()
        wanted = each.model.get_prompt_embedding_to_save("default")
        saved = load_file(os.path.join(folder, "adapter_model.safetensors"))
        assert_same(saved, {"prompt_embeddings": wanted.detach()})
        each.sharded_model.close()
