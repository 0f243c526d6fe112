"""TRL's Trainers with another import: real tiny runs beside plain TRL."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from gemini import ShardedModel
from gemini.integrations import trl as sharded_trl
from gemini.integrations.trl import DPOTrainer, RewardTrainer, SFTTrainer
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.shared_folder import shared_folder

WHERE: dict[str, Any] = {"device": "emulated", "chunk_size": 2048, "tensor_placement_policy": "cpu"}
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=1))


def settings(folder: Path, batch: int) -> dict[str, Any]:
    how = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", "report_to": []}
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "max_grad_norm": 0.0,  # torch's own norm is added up in another order than the exact one
        "optim": "adamw_torch",  # the fused one rounds the last elements of each tensor otherwise
        **how,
    }


def sft(kind: Any, folder: Path, batch: int, **more: Any) -> Any:
    texts = [" ".join(f"w{(number * 7 + word) % 60}" for word in range(8)) for number in range(24)]
    args = trl.SFTConfig(**settings(folder, batch), max_length=16)
    data = Dataset.from_dict({"text": texts})
    return kind(model=llama(), args=args, train_dataset=data, processing_class=tokenizer(), **more)


def preferences() -> Dataset:
    pairs = {"prompt": [f"w{n} w{n + 1}" for n in range(24)], "chosen": [f" w{n + 2} w{n + 3}" for n in range(24)]}
    return Dataset.from_dict({**pairs, "rejected": [f" w{n + 5} w{n + 9}" for n in range(24)]})


def dpo(kind: Any, folder: Path, batch: int, said: dict[str, Any] | None = None, **more: Any) -> Any:
    args = trl.DPOConfig(**settings(folder, batch), **(said or {}))
    more = {"ref_model": llama(), **more}
    return kind(model=llama(), args=args, train_dataset=preferences(), processing_class=tokenizer(), **more)


def reward(kind: Any, folder: Path, batch: int, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, vocab_size=64, pad_token_id=0, num_labels=1))
    args = trl.RewardConfig(**settings(folder, batch), max_length=16)
    return kind(model=model, args=args, train_dataset=preferences(), processing_class=tokenizer(), **more)


def train(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


KINDS: dict[str, Any] = {
    "sft": (sft, trl.SFTTrainer, SFTTrainer),
    "dpo": (dpo, trl.DPOTrainer, DPOTrainer),
    "reward": (reward, trl.RewardTrainer, RewardTrainer),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", KINDS)
def test_one_rank_has_the_bits_of_plain_trl(tmp_path: Path, what: str) -> None:
    make, theirs, ours = KINDS[what]
    # One after the other: a Trainer seeds the generator when it is made, and draws the order of its data from it.
    plain = make(theirs, tmp_path, 2)
    expected = train(plain)
    sharded = make(ours, tmp_path, 2, **WHERE)
    assert train(sharded) == expected
    whole = sharded.sharded_model.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in plain.model.state_dict().items())
    sharded.save_model(str(tmp_path / "out"))
    saved = type(plain.model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in whole.items())


@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", KINDS)
def test_two_ranks_train_one_model(rank: int, world_size: int, what: str) -> None:
    make, _, ours = KINDS[what]
    with shared_folder() as folder:
        trainer = make(ours, folder, 2, **WHERE)
        losses = train(trainer)
        assert trainer.sharded_model.world_size == 2 and len(losses) == 3
        sums = [float(value.double().sum()) for value in trainer.sharded_model.state_dict().values()]
        assert gathered(sums)[0] == gathered(sums)[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "said", [{"sync_ref_model": True, "ref_model_sync_steps": 1}, {"precompute_ref_log_probs": True}]
)
def test_a_reference_model_follows_and_is_computed_before_as_with_plain_trl(
    tmp_path: Path, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = train(dpo(trl.DPOTrainer, tmp_path, 2, said))
    assert train(dpo(DPOTrainer, tmp_path, 2, said, **WHERE)) == expected


@pytest.mark.filterwarnings("ignore")
def test_trainers_take_their_arguments_by_position(tmp_path: Path) -> None:
    expected = train(dpo(trl.DPOTrainer, tmp_path, 2))
    model, args = llama(), trl.DPOConfig(**settings(tmp_path, 2))
    reference = llama()
    trainer = DPOTrainer(model, reference, args, None, preferences(), processing_class=tokenizer(), **WHERE)
    assert trainer.args is args and trainer.ref_model.module is reference
    assert train(trainer) == expected
    with pytest.raises(TypeError, match="multiple values for argument 'args'"):
        DPOTrainer(llama(), reference, args, args=args)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("theirs", "ours"), [(trl.SFTTrainer, SFTTrainer), (trl.DPOTrainer, DPOTrainer)], ids=["sft", "dpo"]
)
def test_without_args_a_trainer_has_its_own_defaults(
    tmp_path: Path, theirs: Any, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    texts = preferences() if theirs is trl.DPOTrainer else Dataset.from_dict({"text": ["w1 w2 w3"] * 4})
    more_of_dpo = {"ref_model": llama()} if theirs is trl.DPOTrainer else {}
    made = [
        kind(llama(), **more_of_dpo, train_dataset=texts, processing_class=tokenizer(), **more)
        for kind, more in ((theirs, {}), (ours, WHERE))
    ]
    expected, found = (trainer.args for trainer in made)
    assert type(found) is type(expected)
    of_run = ("logging_dir", "run_name")  # of the moment
    assert [
        name for name, value in expected.to_dict().items() if name not in of_run and found.to_dict()[name] != value
    ] == []
    assert made[1].sharded_model.settings.dtype[""] is torch.bfloat16  # TRL's own default


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bound", [{}, {"device_memory": "300KB"}], ids=["no budget", "budget"])
def test_a_reference_model_is_sharded_and_frozen(rank: int, world_size: int, bound: dict[str, Any]) -> None:
    where = {"device": "emulated", "chunk_size": 2048, **bound}
    with shared_folder() as folder:
        trainer = dpo(DPOTrainer, folder, 2, **where)
        reference = trainer.ref_model
        assert isinstance(reference, ShardedModel) and reference.world_size == world_size
        assert not any(each.requires_grad for each in reference.parameters())
        train(trainer)
    ledgers = reference.chunk_manager.memory.device.ledger, reference.chunk_manager.memory.host.ledger
    numel = sum(each.numel() for each in reference.parameters())
    # fp32 weights once over the ranks, with the paddings of small chunks, and no state of an optimizer
    assert sum(ledger.peak_by_kind["param"] for ledger in ledgers) <= 4 * numel / world_size * 1.1
    assert not any(ledger.peak_by_kind[kind] for ledger in ledgers for kind in ("grad", "master", "optim"))
    if bound:
        # The budget is that of the model that trains; beside it there are the fewest slots.
        assert ledgers[0].peak_bytes == reference.plan.packed_minimum_bytes


def test_every_trainer_of_trls_has_its_name_and_nothing_else_has() -> None:
    assert sharded_trl.GRPOTrainer is sharded_trl.GRPOTrainer
    assert issubclass(sharded_trl.GRPOTrainer, trl.GRPOTrainer) and sharded_trl.GRPOTrainer.__name__ == "GRPOTrainer"
    for name in ("NoTrainer", "SFTConfig"):
        with pytest.raises(AttributeError, match=f"has no Trainer '{name}'"):
            getattr(sharded_trl, name)


@pytest.mark.filterwarnings("ignore")
def test_grpo_has_the_losses_of_plain_trl(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")

    def make(kind: Any, **more: Any) -> Any:
        args = trl.GRPOConfig(**settings(tmp_path, 4), num_generations=2, max_completion_length=4, beta=0.04)
        prompts = Dataset.from_dict({"prompt": [f"w{number} w{number + 1}" for number in range(24)]})
        lengths = lambda completions, **_: [float(len(set(text))) for text in completions]  # noqa: E731
        path = str(tmp_path / "model")
        parts = {"reward_funcs": lengths, "args": args, "train_dataset": prompts, "processing_class": tokenizer()}
        return kind(model=path, **parts, **more)

    expected = train(make(trl.GRPOTrainer))
    assert train(make(sharded_trl.GRPOTrainer, **WHERE)) == expected
