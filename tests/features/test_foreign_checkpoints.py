"""Checkpoints that DeepSpeed and FSDP2 have written themselves become ours, and training goes on from them."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict

from gemini import CheckpointError, ShardedModel, ShardedOptimizer, load_checkpoint
from gemini.checkpoint.foreign import import_checkpoint, read_foreign
from gemini.deepspeed.utils import zero_to_fp32
from tests.checkpoints.write_deepspeed import Model
from tests.harness.on_ranks import on_ranks
from tests.harness.shared_folder import shared_folder

FIXTURES = Path(__file__).resolve().parents[1] / "checkpoints" / "deepspeed"
NAMES = ["stage1_bf16", "stage2_fp32", "stage3_bf16", "universal"]
TOKENS = torch.arange(4).view(2, 2)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """As `write_deepspeed.py` divides them."""
    decays = [parameter for parameter in module.parameters() if parameter.ndim > 1 and parameter.requires_grad]
    biases = [parameter for parameter in module.parameters() if parameter.ndim == 1]
    return [{"params": decays, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def names_of(module: nn.Module) -> list[str]:
    """Those of the parameters in the groups, in their order."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [name for wanted in (True, False) for name, parameter in named if (parameter.ndim > 1) is wanted]


def expected(name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(FIXTURES / name / "expected.safetensors")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_masters_and_moments_are_deepspeeds(name: str, tmp_path: Path) -> None:
    wanted, found = expected(name), read_foreign(FIXTURES / name)
    assert len(wanted) == 15 and found.optimizer is not None and found.optimizer.num_steps == 3
    for key, value in wanted.items():
        ours = f"model.{key}" if key.endswith(("weight", "bias")) else f"optim.state.{key}"
        assert torch.equal(found.tensors[ours].read().reshape(-1), value.reshape(-1)), key
    assert {fact.name for fact in found.parameters if not fact.trained} == {"frozen.weight"}
    assert [fact.name for fact in found.buffers] == ["scale"]


@on_ranks(1, 2)
@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_as_plain_pytorch_would(rank: int, world_size: int, name: str) -> None:
    """In fp32, where plain AdamW with DeepSpeed's states makes the same step; 16 bits load into their masters."""
    with shared_folder() as folder:
        if rank == 0:
            import_checkpoint(FIXTURES / name, folder)
        dist.barrier() if world_size > 1 else None
        model = ShardedModel(Model(), device="emulated", chunk_size=64)
        optimizer = ShardedOptimizer(model, torch.optim.AdamW(groups_of(model), lr=1e-2))
        assert load_checkpoint(folder, model, optimizer).step == 3
        wanted = expected(name)
        plain = Model()
        plain.load_state_dict(model.state_dict())
        own = torch.optim.AdamW(groups_of(plain), lr=1e-2)
        states = {}
        for number, key in enumerate(names_of(plain)):
            moments = {each: wanted[f"{key}.{each}"] for each in ("exp_avg", "exp_avg_sq")}
            shape = plain.get_parameter(key).shape
            states[number] = {"step": torch.tensor(3.0)} | {each: its.view(shape) for each, its in moments.items()}
        own.load_state_dict({"state": states, "param_groups": own.state_dict()["param_groups"]})
        for module, its in ((model, optimizer), (plain, own)):
            loss = module(TOKENS)
            its.backward(loss) if isinstance(its, ShardedOptimizer) else loss.backward()
            its.step()
        state = model.state_dict()
        assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
        model.close()


@on_ranks(2)
def test_what_fsdp2_has_saved_is_loaded(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    theirs = Model()
    fully_shard(theirs.up, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(theirs, mesh=init_device_mesh("cpu", (2,)))
    own = torch.optim.AdamW(groups_of(theirs), lr=3e-3)
    for _ in range(2):
        theirs(TOKENS + rank).backward()
        own.step()
        own.zero_grad()
    model_state, optimizer_state = get_state_dict(theirs, own)
    with shared_folder() as folder:
        state_dict_saver.save(
            {"app": {"model": model_state, "optim": optimizer_state}}, checkpoint_id=folder / "theirs"
        )
        if rank == 0:
            import_checkpoint(folder / "theirs", folder / "ours")
        dist.barrier()
        model = ShardedModel(Model(), device="emulated", chunk_size=64)
        optimizer = ShardedOptimizer(model, torch.optim.AdamW(groups_of(model)))
        assert load_checkpoint(folder / "ours", model, optimizer).step == 2
        assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 3e-3]
        state, whole = model.state_dict(), optimizer.state_dict()["state"]
        for key, value in model_state.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(state[key], value), key
        for number, key in enumerate(names_of(theirs)):
            its = optimizer_state["state"][key]
            for each in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(whole[number][each], its[each].full_tensor()), (key, each)
            assert whole[number]["step"] == its["step"] == 2
        model.close()


def test_incomplete_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    for name, pattern, match in (
        ("stage3_bf16", "*pp_rank_1*optim*", "was saved by 2 ranks, and has the files of 1"),
        ("stage1_bf16", "*pp_rank_0*optim*", "lacks the files .* of ranks 0"),
        ("stage2_fp32", "*optim*", "without masters and states"),
        ("universal", "fp32.pt", r"lacks .*/fp32\.pt"),
    ):
        folder = Path(shutil.copytree(FIXTURES / name, tmp_path / f"{name}{len(match)}"))
        for path in folder.rglob(pattern):
            path.unlink()
        with pytest.raises(CheckpointError, match=match):
            read_foreign(folder)
    folder = Path(shutil.copytree(FIXTURES / "stage2_fp32", tmp_path / "cut"))
    path = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"rank_1.*is damaged, or no file of torch\.save"):
        import_checkpoint(folder, tmp_path / "ours")
    assert not list((tmp_path / "ours").glob("*")) if (tmp_path / "ours").exists() else True
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is no checkpoint that can be imported"):
        read_foreign(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="does not exist"):
        read_foreign(tmp_path / "nowhere")


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    done = tmp_path / "done"
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(pickle.dumps(_Attack(done)))
    with pytest.raises(CheckpointError, match=r"no metadata of .*: posix\.system"):
        read_foreign(dcp)
    (dcp / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.filesystem\nos.system\n(S'touch x'\ntR.")
    with pytest.raises(CheckpointError, match="no metadata of"):
        read_foreign(dcp)
    folder = Path(shutil.copytree(FIXTURES / "stage1_bf16", tmp_path / "zero"))
    state = {"optimizer_state_dict": _Attack(done)}
    torch.save(state, folder / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"objects that only their own code can read \(posix\.system\)"):
        read_foreign(folder)
    assert not done.exists()


@pytest.mark.parametrize("name", NAMES)
def test_deepspeeds_functions_for_fp32_weights_read_its_folders_and_ours(name: str, tmp_path: Path) -> None:
    import_checkpoint(FIXTURES / name, tmp_path)
    wanted = {key: value for key, value in expected(name).items() if key.endswith(("weight", "bias"))}
    for folder in (FIXTURES / name, tmp_path):
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        assert all(torch.equal(found[key], value.view_as(found[key])) for key, value in wanted.items())
        assert {*found} - {*wanted} == {"head.weight", "frozen.weight", "scale"}
        assert all(value.dtype is torch.float32 for value in found.values())
        fewer = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
        assert {*found} - {*fewer} == {"frozen.weight"}
        out = tmp_path / f"out{len(str(folder))}"
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, out, safe_serialization=True)
        assert torch.equal(load_file(out / "model.safetensors")["up.bias"], wanted["up.bias"])
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, out)
        assert torch.equal(torch.load(out / "pytorch_model.bin", weights_only=True)["up.bias"], wanted["up.bias"])
        model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Model(), folder)
        assert torch.equal(model.up.bias.detach(), wanted["up.bias"])


class _Causal(nn.Module):
    """As Hugging Face's causal language models: a child of the name `model`, and children that share a child's name."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.a = nn.ModuleDict({"model": nn.Linear(4, 4)})
        self.b = nn.ModuleDict({"model": nn.Linear(4, 4)})


@pytest.mark.parametrize("nested", ["itself", "model", "app", "optimizer", "wrapped"])
@pytest.mark.parametrize("has_paths", [True, False])
def test_names_of_dcps_folders_are_those_of_the_state_dict(nested: str, has_paths: bool, tmp_path: Path) -> None:
    plain = _Causal()
    state: dict[str, Any] = dict(plain.state_dict())
    if nested == "wrapped":
        state = {"model": {f"module.{name}": value for name, value in state.items()}}
    elif nested == "optimizer":
        own = torch.optim.AdamW(plain.parameters())
        sum(parameter.square().sum() for parameter in plain.parameters()).backward()
        own.step()
        state = dict(zip(("model", "optim"), get_state_dict(plain, own), strict=True))
    elif nested != "itself":
        state = {"app": {"model": state}} if nested == "app" else {"model": state}
    state_dict_saver.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    if not has_paths:
        path = tmp_path / "theirs" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        metadata.planner_data = None
        path.write_bytes(pickle.dumps(metadata))
    found = read_foreign(tmp_path / "theirs")
    for name, value in plain.state_dict().items():
        assert torch.equal(found.tensors[f"model.{name}"].read(), value), name
        if nested == "optimizer":
            assert found.optimizer is not None and found.optimizer.states[name] == ["exp_avg", "exp_avg_sq"]
    assert {fact.name for fact in found.parameters} == {*plain.state_dict()}


def test_two_values_of_one_name_and_missing_files_of_dcp_are_refused(tmp_path: Path) -> None:
    one = {"model": {"weight": torch.ones(2)}, "module": {"weight": torch.zeros(2)}}
    state_dict_saver.save(one, checkpoint_id=tmp_path / "two", no_dist=True)
    with pytest.raises(CheckpointError, match=r"two tensors of the name 'model\.weight'"):
        read_foreign(tmp_path / "two")
    state_dict_saver.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "lacks", no_dist=True)
    next((tmp_path / "lacks").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"lacks __0_0\.distcp"):
        read_foreign(tmp_path / "lacks")


def test_a_folder_of_hugging_faces_is_read_by_its_index(tmp_path: Path) -> None:
    values = {"a": torch.ones(2), "b": torch.zeros(3)}
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, key in zip(names, values, strict=True):
        save_file({key: values[key]}, tmp_path / name)
    save_file({"a": torch.full((2,), 7.0)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"two tensors of the name 'a', in consolidated.*model-00001"):
        read_foreign(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip(values, names, strict=True))}))
    found = read_foreign(tmp_path)
    assert all(torch.equal(found.tensors[f"model.{key}"].read(), value) for key, value in values.items())
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[0]}}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors lacks b"):
        read_foreign(tmp_path)
    index.write_text(json.dumps({"weight_map": dict(zip(values, names, strict=True))}))
    (tmp_path / names[1]).unlink()
    for _ in range(2):  # by the index, and by the numbers in the names
        with pytest.raises(CheckpointError, match=rf"lacks {names[1]}"):
            read_foreign(tmp_path)
        index.unlink(missing_ok=True)


def test_sparse_tensors_and_the_old_format_of_torch_are_refused_by_what_they_are(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(CheckpointError, match=r"a is a sparse tensor \(torch\.sparse_coo\).*to_dense"):
        read_foreign(tmp_path / "sparse.pt")
    torch.save({"a": torch.eye(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"format of torch\.save before torch 1\.6.*write it again"):
        read_foreign(tmp_path / "old.pt")
