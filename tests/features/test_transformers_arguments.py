"""What a script says in TrainingArguments and in a config, for `gemini.integrations.transformers.Trainer`."""

import inspect
import json
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import numpy as np
import pytest
import torch
import transformers
import transformers.trainer
from safetensors.torch import load_file
from torch import nn

import gemini
from gemini import ConfigError, HybridAdam, ShardedModel, UnsupportedError, state_hash
from gemini.integrations import transformers as integration
from gemini.integrations.transformers import ShardedTraining, Trainer
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.shared_folder import shared_folder
from tests.zoo.hf_trainers import (
    DTYPES,
    SHARDED,
    Recorded,
    arguments,
    by_hand,
    flags_of,
    gpt2,
    logged,
    on_a_machine_without_gpus,
    trainer,
)
from tests.zoo.mlp import assert_same, weights_of

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}


@on_ranks_with("dtype", {1: ["fp32"], 2: ["bf16"]}, soak={2: ["fp32"]})
def test_a_deepspeed_file_is_completed_by_the_training_arguments(rank: int, world_size: int, dtype: str) -> None:
    """As transformers does for DeepSpeed; a training that is resumed has the bits of one that went on."""
    with shared_folder() as folder:
        path = Path(folder, f"ds-{rank}.json")
        path.write_text(json.dumps(AUTO))
        runs = []
        for checkpoint in (None, f"{folder}/checkpoint-2"):
            saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
            each = trainer(folder, sharded={**SHARDED, "config": str(path)}, **saving, **flags_of(dtype))
            each.train(resume_from_checkpoint=checkpoint)
            runs.append((state_hash(each.sharded_model, each.optimizer), logged(each), logged(each, "learning_rate")))
            each.sharded_model.close()
        assert runs[0] == runs[1]
        model, optimizer = each.sharded_model, each.optimizer
        assert model.settings.stage == 2
        assert next(iter(model.parameters())).dtype == DTYPES[dtype]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert optimizer.param_groups[0]["eps"] == 1e-8
        # DeepSpeed's first two rates are one; up to 1e-2 in two steps, and then down to 0 at the sixth
        assert runs[0][2] == pytest.approx([0.0, 0.0, 0.01, 0.01, 0.0075, 0.005])
        assert each.sharding.clip_grad_norm == 0.5
        assert each.sharding.train_batch_size == 4 * world_size


def test_a_config_of_ours_takes_from_the_arguments_what_it_leaves_out(tmp_path: Path) -> None:
    config = {"model_data_memory": "300KiB", "optimizer": {"type": "HybridAdam"}, "stage": 1}
    each = trainer(tmp_path, sharded={**SHARDED, "config": config, "stage": 3})
    each.train()
    (decayed, rest) = each.optimizer.param_groups
    assert (decayed["betas"], decayed["eps"], decayed["weight_decay"]) == ([0.9, 0.999], 1e-8, 0.1)
    assert rest["weight_decay"] == 0.0
    assert each.lr_scheduler.base_lrs == [1e-2, 1e-2]
    assert each.sharded_model.settings.stage == 3, "what Trainer is told goes before what its config says"
    by_torch = trainer(tmp_path)
    by_torch.train()
    assert logged(each) == pytest.approx(logged(by_torch), rel=1e-4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4 in the config and 2 in Training"),
        ({"train_batch_size": 5}, "train_batch_size"),
        ({"train_micro_batch_size_per_gpu": 3}, r"per_gpu is 3 .* and 2 in .*\(per_device_train_batch_size\)"),
        ({"clip_grad_norm": 2.0}, r"clip_grad_norm is 2\.0 in the config and 0\.5 .*\(max_grad_norm\)"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, r"params\.lr is 1\.0 .*0\.01 .*\(learning_rate\)"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.5, 0.9]}}}, r"betas is \[0\.5, 0\.9\] .*adam_beta1"),
        ({"dtype": "bf16"}, "fp16.* the config says dtype=torch.bfloat16"),
        ({"stgae": 2}, "nearest valid one is 'stage'"),
    ],
    ids=["accumulation", "batch", "micro batch", "clipping", "rate", "betas", "dtype", "a typo"],
)
def test_a_config_that_contradicts_the_arguments_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = gpt2()
    with pytest.raises(ConfigError, match=words):
        Trainer(model, arguments(tmp_path, fp16="dtype" in config), config=config)
    assert type(model.lm_head.weight) is torch.nn.Parameter, "nothing was wrapped"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True.* per_device_train_batch_size"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True.* bf16=True"),
        ({"fp16_full_eval": True}, "fp16_full_eval=True.* fp16=True"),
        ({"deepspeed": "ds.json"}, r"deepspeed='ds\.json'.* Trainer\(config="),
        ({"fsdp": "full_shard"}, "fsdp='full_shard'.* stage"),
        ({"_n_gpu": 8}, "8 GPUs are visible to one process.* torchrun --nproc-per-node 8"),
        ({"mixed_precision": "fp8"}, "fp8"),
    ],
    ids=str,
)
def test_arguments_that_sharding_cannot_follow_are_refused_by_name(
    flags: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """TrainingArguments check deepspeed and fsdp themselves, before anything else: they are set afterwards here."""
    late = {"deepspeed", "fsdp", "_n_gpu", "mixed_precision"}
    args = arguments(tmp_path, **{name: value for name, value in flags.items() if name not in late})
    for name in late & flags.keys():
        setattr(args, name, flags[name])
    with pytest.raises(UnsupportedError, match=words):
        Trainer(gpt2(), args)


def test_a_model_on_several_devices_is_refused(tmp_path: Path) -> None:
    model = gpt2()
    model.hf_device_map = {"transformer": 0, "lm_head": "cpu"}
    with pytest.raises(UnsupportedError, match="device_map= onto several devices"):
        Trainer(model, arguments(tmp_path))


@on_ranks(2)
def test_ranks_that_the_arguments_do_not_know_are_told_what_to_say(rank: int, world_size: int) -> None:
    """Without a GPU and without use_cpu each rank would be the first of one, train on all data and write all files."""
    with shared_folder() as folder, on_a_machine_without_gpus():
        with pytest.raises(UnsupportedError, match=r"2 ranks, of which TrainingArguments knows 1: .*use_cpu=True"):
            trainer(folder, use_cpu=False)


@on_ranks(1, 2)
def test_a_version_that_saves_on_one_rank_alone_is_refused_on_several(rank: int, world_size: int) -> None:
    with shared_folder() as folder, mock.patch("transformers.__version__", "5.22.1"):
        if world_size == 1:
            trainer(folder)
        else:
            with pytest.raises(UnsupportedError, match=r"transformers 5\.22\.1 saves .* >= 5\.23"):
                trainer(folder)


def test_accelerate_launched_for_fsdp_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    monkeypatch.setitem(
        accelerate.state.PartialState._shared_state, "distributed_type", accelerate.DistributedType.MEGATRON_LM
    )
    with pytest.raises(UnsupportedError, match="Accelerate is set to MEGATRON_LM"):
        Trainer(gpt2(), args)


def test_an_unknown_argument_is_told_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="nearest valid name is 'train_dataset'"):
        Trainer(gpt2(), arguments(tmp_path), train_datset=[])
    with pytest.raises(TypeError, match="nearest valid name is 'model_data_memory'"):
        Trainer(gpt2(), arguments(tmp_path), model_data_memry="1GiB")


@pytest.mark.parametrize(
    ("flags", "sharded"),
    [({"bf16": True}, {}), ({}, {"dtype": torch.bfloat16}), ({}, {"config": {"bf16": {"enabled": True}}})],
    ids=["TrainingArguments", "Trainer", "config"],
)
def test_inputs_are_cast_to_the_weights(flags: dict[str, Any], sharded: dict[str, Any], tmp_path: Path) -> None:
    """A module that is none of Hugging Face's own, which would cast by themselves."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            assert x.dtype == torch.bfloat16
            logits = self.linear(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": torch.full((4,), n / 8), "labels": torch.tensor(n % 2)} for n in range(8)]
    each = trainer(tmp_path, Net(), sharded={**SHARDED, **sharded}, train_dataset=data, **flags)
    each.train()
    assert each.label_names == ["labels"]
    assert {parameter.dtype for parameter in each.model.parameters()} == {torch.bfloat16}
    assert np.isfinite(each.predict(data).predictions).all()
    each.save_model()
    assert_same(load_file(tmp_path / "model.safetensors"), weights_of(each.sharded_model))


def test_a_config_names_the_optimizer_of_each_training(tmp_path: Path) -> None:
    given = {**SHARDED, "config": {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}}}
    each = trainer(tmp_path, sharded=given, model_init=lambda: gpt2())
    for _ in range(2):
        each.train()
        assert each.optimizer.param_groups[0]["alpha"] == 0.9


def test_two_optimizers_are_refused(tmp_path: Path) -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {**SHARDED, "config": {"optimizer": {"type": "SGD"}}}
    with pytest.raises(ConfigError, match="an optimizer is given to Trainer"):
        trainer(tmp_path, model, sharded=given, optimizers=(optimizer, None))


def test_a_sharded_model_is_taken_with_its_own_settings_only(tmp_path: Path) -> None:
    model = ShardedModel(gpt2(), **SHARDED)
    with pytest.raises(ConfigError, match="is a ShardedModel already"):
        Trainer(model, arguments(tmp_path), stage=2)
    with pytest.raises(ConfigError, match="dtype"):
        Trainer(model, arguments(tmp_path, bf16=True))
    assert Trainer(model, arguments(tmp_path)).sharded_model is model


@pytest.mark.parametrize(
    ("optim", "kind"), [("adamw_torch_fused", HybridAdam), ("adamw_torch", torch.optim.AdamW)], ids=["fused", "torch"]
)
def test_the_fused_adam_is_ours_and_others_are_torchs(optim: str, kind: Any, tmp_path: Path) -> None:
    each = trainer(tmp_path, optim=optim)
    seen = Recorded(each.model)
    each.train()
    model, optimizer, losses, _ = by_hand(seen.batches, logged(each, "learning_rate"), None, kind)
    assert logged(each) == losses
    assert state_hash(each.sharded_model, each.optimizer) == state_hash(model, optimizer)


def test_the_adafactor_of_the_library_trains_as_in_its_own_trainer(tmp_path: Path) -> None:
    both = [
        trainer(tmp_path, kind=kind, optim="adafactor", max_grad_norm=0.0) for kind in (Trainer, transformers.Trainer)
    ]
    for each in both:
        each.train()
    assert logged(both[0]) == logged(both[1])
    assert_same(weights_of(both[0].sharded_model), weights_of(both[1].model))


def test_a_config_with_muon_trains_hidden_matrices_by_it_and_the_rest_by_adam(tmp_path: Path) -> None:
    """The rates and the decay of TrainingArguments are of both, where the config says none."""
    config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Muon", "params": {"muon_lr": 0.03}}}
    each = trainer(tmp_path, sharded={**SHARDED, "config": config})
    each.train()
    groups = {group["optimizer"]: group for group in each.optimizer.param_groups}
    assert groups["Muon"]["initial_lr"] == 0.03 and groups["HybridAdam"]["initial_lr"] == 1e-2
    assert {p.ndim for p in groups["Muon"]["params"]} == {2}
    names = {p: name for name, p in each.sharded_model.named_parameters()}
    assert all("bias" in names[p] or "ln_" in names[p] for p in groups["HybridAdam"]["params"])
    assert each.sharded_model.module.transformer.h[0].attn.c_attn.weight in each.optimizer.state
    assert logged(each)[-1] < logged(each)[0] + 1


def test_target_modules_say_which_hidden_matrices_muon_updates(tmp_path: Path) -> None:
    given = {**SHARDED, "config": {"optimizer": {"type": "Muon"}}}
    for targets, wanted in ((["attn"], {"attn"}), ("all-linear", {"attn", "mlp"}), (r".*\.c_fc", {"mlp"})):
        each = trainer(tmp_path, sharded=given, optim_target_modules=targets)
        groups = {group["optimizer"]: group["params"] for group in each.create_optimizer().param_groups}
        names = {p: name for name, p in each.sharded_model.named_parameters()}
        assert {names[p].split(".")[-3] for p in groups["Muon"]} == wanted
        each.sharded_model.close()
    with pytest.raises(ConfigError, match=r"optim_target_modules=\['conv'\]\) names no module"):
        trainer(tmp_path, sharded=given, optim_target_modules=["conv"]).create_optimizer()


def _split(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or ".h." not in name]
    return [torch.optim.Muon(matrices, lr=0.02), HybridAdam(rest, lr=1e-2)]


class Factory:
    """What the Trainer takes for optimizers that look at the model."""

    def __call__(self, model: torch.nn.Module) -> Any:
        return _split(model)


def test_several_optimizers_are_given_as_a_list_or_made_by_a_factory(tmp_path: Path) -> None:
    """They are one, and train and go on as two of a plain model do, clipped together."""
    model = gpt2()
    given = _split(model)
    constant = torch.optim.lr_scheduler.LambdaLR(given[0], lambda _: 1.0)
    runs = [
        trainer(tmp_path, model, optimizers=(given, constant)),
        trainer(tmp_path, optimizer_cls_and_kwargs=(Factory, {}), lr_scheduler_type="constant", warmup_steps=0),
    ]
    seen = Recorded(runs[0].model)
    for each in runs:
        each.train()
        assert [group["optimizer"] for group in each.optimizer.param_groups] == ["Muon", "HybridAdam"]
    plain = gpt2()
    optimizers = _split(plain)
    for number, batch in enumerate(seen.batches):
        plain(**batch).loss.backward()  # the Trainer divides by the tokens of a step
        if number % 2 == 1:
            gemini.clip_grad_norm_(plain.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for each in runs:
        assert_same(weights_of(each.sharded_model), weights_of(plain))


@pytest.mark.soak
def test_a_compiled_model_trains(tmp_path: Path) -> None:
    """Of an operator that is the whole model all weights are on the device at once."""
    compiled = trainer(tmp_path, sharded={**SHARDED, "model_data_memory": "1MiB"}, torch_compile_backend="eager")
    compiled.train()
    plain = trainer(tmp_path)
    plain.train()
    assert [operator.name for operator in compiled.sharded_model.operators] == [""]
    assert logged(compiled) == pytest.approx(logged(plain), rel=1e-5)


def test_a_trainer_of_ones_own_is_sharded_by_a_base_class(tmp_path: Path) -> None:
    class Theirs(transformers.Trainer):
        def __init__(self, *args: Any, weight: float, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.weight = weight

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return self.weight * super().compute_loss(*args, **kwargs)

    class Mine(ShardedTraining, Theirs):
        pass

    runs = []
    for kind, more in ((Theirs, {}), (Mine, SHARDED)):
        its: Any = kind(gpt2(), arguments(tmp_path), train_dataset=trainer(tmp_path).train_dataset, weight=2.0, **more)
        its.train()
        runs.append(logged(its))
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
    assert runs[1][0] > 10


PRIVATE = {
    "_build_accelerator_args": "(self, **kwargs)",
    "_has_mixed_mesh_grads": "(self, model)",
    "_load_best_model": "(self)",
    "_load_from_checkpoint": "(self, resume_from_checkpoint, model)",
    "_load_optimizer_and_scheduler": "(self, checkpoint)",
    "_move_model_to_device": "(self, model, device)",
    "_save": "(self, output_dir, state_dict)",
    "_save_checkpoint": "(self, model, trial)",
    "_save_optimizer_and_scheduler": "(self, output_dir)",
    "_wrap_model": "(self, model, training, dataloader)",
}
"""What of transformers.Trainer is ours though it is private, and how the Trainer calls it."""
PUBLIC = (
    "call_model_init",
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "create_scheduler",
    "evaluation_loop",
    "end",
    "train",
)
OF_ACCELERATE = ("backward", "clip_grad_norm_", "no_sync", "optimizer_step_was_skipped", "prepare_optimizer")


def _shape(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    names = ("**" * (each.kind is each.VAR_KEYWORD) + each.name for each in parameters)
    return f"({', '.join(names)})"


def test_the_private_names_that_are_used_are_these_and_there() -> None:
    """A release without one of them would call ours no more, and shard nothing, or save one rank's part."""
    theirs, own = transformers.Trainer, vars(ShardedTraining)
    assert {name: _shape(getattr(theirs, name)) for name in PRIVATE} == PRIVATE
    assert {name for name in own if name in vars(theirs) and not name.startswith("__")} == {*PRIVATE, *PUBLIC}
    source = inspect.getsource(transformers.trainer)
    for name in (*PRIVATE, *PUBLIC[:-2]):
        assert f"self.{name}(" in source, f"the Trainer does not call {name}"
    for name in ("_created_lr_scheduler", "optimizer_cls_and_kwargs", "model_wrapped"):
        assert f"self.{name} = " in source
    for name in OF_ACCELERATE:
        assert f"self.accelerator.{name}" in source.replace("accelerator.prepare(", "accelerator.prepare_optimizer(")
        assert hasattr(accelerate.Accelerator, name)
    assert transformers.trainer.OPTIMIZER_NAME == "optimizer.pt"


def test_every_name_of_the_integration_is_documented() -> None:
    for name in ("ShardedTraining", "Trainer", "Seq2SeqTrainer"):
        assert getattr(integration, name).__doc__


def test_updates_in_the_backward_train_without_clipping_and_log_the_norm(tmp_path: Path) -> None:
    found = []
    for in_backward in (False, True):
        each = trainer(
            tmp_path,
            sharded={**SHARDED, "update_in_backward": in_backward},
            gradient_accumulation_steps=1,
            max_grad_norm=0,
        )
        each.train()
        found.append((logged(each, "grad_norm"), state_hash(each.sharded_model)))
    assert found[0] == found[1]
    clipped = trainer(tmp_path, sharded={**SHARDED, "update_in_backward": True}, gradient_accumulation_steps=1)
    with pytest.raises(ValueError, match=r"max_grad_norm=0.5\), where 0 does not clip, needs all gradients"):
        clipped.train()
