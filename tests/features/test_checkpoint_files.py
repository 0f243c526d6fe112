"""Checkpoint directories: what damages them, what a crash leaves, which ones stay; and the command line over them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import gemini
from gemini import CheckpointError, HybridAdam, Keep, ShardedModel, ShardedOptimizer, load_checkpoint, save_checkpoint
from gemini.checkpoint.exporting import export_weights
from gemini.checkpoint.foreign import fp32_weights
from gemini.checkpoint.tensor_files import parts_in
from gemini.cli.app import app
from gemini.deepspeed.utils import zero_to_fp32
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.shared_folder import shared_folder

ROOT = Path(__file__).resolve().parents[2]


def make(seed: int = 0, width: int = 16, adam: Any = HybridAdam) -> tuple[ShardedModel, ShardedOptimizer]:
    torch.manual_seed(seed)
    model = ShardedModel(nn.Sequential(nn.Linear(16, width), nn.Linear(width, 4)), chunk_size=512, device="emulated")
    return model, ShardedOptimizer(model, adam(model.parameters(), lr=1e-2))


def step(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 16)).square().mean())
    optimizer.step()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGE: dict[str, Any] = {
    "a bit of a tensor": (lambda folder: flip(folder / "states-00000-0.safetensors", -3), "is damaged: tensor"),
    "a bit of a header": (lambda folder: flip(folder / "states-00000-0.safetensors", 40), "states-00000-0.safetensors"),
    "a shorter file": (lambda folder: truncate(folder / "states-00000-0.safetensors"), "states-00000-0.safetensors"),
    "no file": (lambda folder: (folder / "states-00000-0.safetensors").unlink(), "No such file"),
    "a bit of a rank's file": (lambda folder: flip(folder / "rank-00000.json", 9), "is not as it was written"),
    "a shorter manifest": (lambda folder: truncate(folder / "checkpoint.json"), "is damaged: it is no JSON"),
    "another program's": (
        lambda folder: (folder / "checkpoint.json").write_text("{}"),
        "not of a checkpoint that",
    ),
    "a later version": (
        lambda folder: (folder / "checkpoint.json").write_text('{"format": "gemini checkpoint", "version": 9}'),
        "has version 9 of the format, this gemini reads up to 1",
    ),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_is_said_on_all_ranks_and_changes_nothing(rank: int, world_size: int, what: str) -> None:
    damage, words = DAMAGE[what]
    with shared_folder() as folder:
        model, optimizer = make()
        step(model, optimizer)
        path = save_checkpoint(folder, model, optimizer)
        step(model, optimizer)
        before = gemini.state_hash(model, optimizer)
        gathered(None)
        if rank == 0:
            damage(path)
        gathered(None)
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(path, model, optimizer)
        assert gemini.state_hash(model, optimizer) == before
        step(model, optimizer)


@on_ranks(1, 2)
def test_another_models_checkpoint_is_refused_with_every_name(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        save_checkpoint(folder, *make(), tag="it")
        other = make(width=20)
        before = gemini.state_hash(*other)
        with pytest.raises(CheckpointError, match=r"0\.weight has shape \(20, 16\), in .* \(16, 16\).*1\.weight"):
            load_checkpoint(folder, *other)
        with pytest.raises(ValueError, match="another optimizer's"):
            load_checkpoint(folder, *make(adam=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9)))
        assert gemini.state_hash(*other) == before
        plain = ShardedModel(nn.Sequential(nn.Linear(16, 16)), device="emulated")
        with pytest.raises(CheckpointError, match=r"the model lacks 1\.weight, 1\.bias"):
            load_checkpoint(folder, plain, weights_only=True)
        load_checkpoint(folder, plain, weights_only=True, strict=False)


@on_ranks(1, 2)
def test_a_directory_that_cannot_be_written_is_said_on_all_ranks(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        model, optimizer = make()
        if rank == 0:
            (folder / "file").write_text("")
        gathered(None)
        with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
            save_checkpoint(folder / "file" / "below", model, optimizer)
        if world_size > 1:
            with pytest.raises(CheckpointError, match="another directory on this rank than on rank 0"):
                save_checkpoint(folder / f"own{rank}" / "checkpoints", model, optimizer)
        save_checkpoint(folder, model, optimizer)
        step(model, optimizer)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root may mount a small disk")
def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=110k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        model, optimizer = make(width=400)
        save_checkpoint(tmp_path, model, tag="small")
        with pytest.raises(CheckpointError, match=r"No space left on device \(errno 28\)"):
            save_checkpoint(tmp_path, model, optimizer)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "small"]
        load_checkpoint(tmp_path, model, weights_only=True)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@on_ranks(1, 2)
def test_old_checkpoints_go_and_every_so_many_stay(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        model, optimizer = make()
        for _ in range(7):
            step(model, optimizer)
            save_checkpoint(folder, model, optimizer, keep=Keep(last=2, every=3))
        names = sorted(each.name for each in folder.iterdir())
        assert names == ["latest", "step_3", "step_6", "step_7"]
        save_checkpoint(folder, model, optimizer, extra="again")  # the same name
        assert load_checkpoint(folder, model, optimizer).extra == "again"
        for tag in ("a/b", ".hidden", "latest", ""):
            with pytest.raises(ValueError, match="cannot name a checkpoint"):
                save_checkpoint(folder, model, optimizer, tag=tag)
        with pytest.raises(CheckpointError, match="has no complete checkpoint 'nine'"):
            load_checkpoint(folder, model, optimizer, tag="nine")


@on_ranks(1)
def test_what_cannot_be_saved_is_named_before_anything_is_written(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\] is a builtins\.object"):
            save_checkpoint(folder, *make(), extra={"a": [1, object()]})
        with pytest.raises(TypeError, match="scheduler is a int without state_dict"):
            save_checkpoint(folder, *make(), scheduler=3)
        assert not list(folder.iterdir())


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_after_kill_9_the_last_complete_checkpoint_loads(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-m", "tests.features.checkpoint_killer", str(tmp_path), str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 + 10 * kills)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"loaded {kills}" in done.stdout


def test_a_checkpoint_of_version_1_loads_for_ever() -> None:
    folder = ROOT / "tests" / "checkpoints" / "v1"
    model, optimizer = make(3)
    loaded = load_checkpoint(folder, model, optimizer)
    assert (loaded.step, loaded.extra) == (2, {"text": "é", "pair": (1, 2.5), "infinite": float("inf")})
    wanted = json.loads((folder.parent / "v1.json").read_text())
    assert {name: value.double().sum().item() for name, value in model.state_dict().items()} == wanted["weights"]
    state = optimizer.state_dict()["state"]
    found = {f"{n}.{name}": float(value.double().sum()) for n, its in state.items() for name, value in its.items()}
    assert found == wanted["states"]


def test_damaged_weights_are_not_exported(tmp_path: Path) -> None:
    model, optimizer = make()
    step(model, optimizer)
    path = save_checkpoint(tmp_path / "saved", model, optimizer)
    file = path / "states-00000-0.safetensors"
    part = next(each for each in parts_in(file)[0] if each.part.key == "model.0.weight")
    flip(file, part.start + 3)
    words = r"tensor 'model\.0\.weight' is not as it was written"
    with pytest.raises(CheckpointError, match=words):
        export_weights(tmp_path / "saved", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(CheckpointError, match=words):
        dict(fp32_weights(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match=words):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "theirs")
    assert command("export", tmp_path / "saved", tmp_path / "out")[0] == 2
    flip(file, part.start + 3)
    assert command("export", tmp_path / "saved", tmp_path / "out")[0] == 0
    flip(file, 40)
    with pytest.raises(CheckpointError, match=r"states-00000-0\.safetensors"):
        dict(fp32_weights(tmp_path / "saved"))


class _Expanded(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x)
        return found


@on_ranks(1, 2)
def test_an_expanded_buffer_is_loaded_or_refused_before_anything_changes(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        for tag, buffer in (("alike", torch.full((1, 4), 3.0).expand(3, 4)), ("other", torch.arange(12.0).view(3, 4))):
            save_checkpoint(folder, ShardedModel(_Expanded(buffer), device="emulated"), tag=tag)
        model = ShardedModel(_Expanded(torch.zeros(1, 4).expand(3, 4)), device="emulated")
        before = gemini.state_hash(model)
        with pytest.raises(CheckpointError, match="mask is a buffer whose elements share memory"):
            load_checkpoint(folder, model, tag="other", weights_only=True)
        assert gemini.state_hash(model) == before
        load_checkpoint(folder, model, tag="alike", weights_only=True)
        assert torch.equal(model.state_dict()["mask"], torch.full((3, 4), 3.0))


def command(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return done.exit_code, done.stdout


def test_a_checkpoint_is_exported_for_from_pretrained_and_comes_back(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    module.save_pretrained(tmp_path / "base")
    model = ShardedModel(module, dtype=torch.bfloat16)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
    ids = torch.randint(0, 64, (2, 9))
    optimizer.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    save_checkpoint(tmp_path / "saved", model, optimizer)
    assert command("verify", tmp_path / "saved")[0] == 0
    code, shown = command("inspect", tmp_path / "saved", "--json")
    assert code == 0 and json.loads(shown)["optimizer"] == "HybridAdam, 1 group(s)"
    arguments = tmp_path / "saved", tmp_path / "out", "--config", tmp_path / "base", "--max-file", "20KB"
    assert command("export", *arguments)[0] == 0
    assert command("export", *arguments)[0] == 2, "the folder is not empty by now"
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.bfloat16, "as its config says"
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    whole = model.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in back.state_dict().items())
    assert back.generate(ids[:1], max_new_tokens=2).shape == (1, 11)
    assert command("export", tmp_path / "saved", tmp_path / "masters", "--dtype", "fp32")[0] == 0
    assert command("import", tmp_path / "masters", tmp_path / "again")[0] == 0
    fresh = ShardedModel(LlamaForCausalLM(config), dtype=torch.bfloat16)
    load_checkpoint(tmp_path / "again", fresh, weights_only=True)
    assert all(torch.equal(value, whole[name]) for name, value in fresh.state_dict().items())
    flip(next((tmp_path / "saved").glob("step_1/states-*-0.safetensors")), -1)
    assert command("verify", tmp_path / "saved")[0] == 2
