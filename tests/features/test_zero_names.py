"""`deepspeed.zero.Init` and the launchers: other libraries' names for what is here."""

import argparse
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from gemini import ConfigError, deepspeed, launch
from gemini.building.zero_init import ZeroInitContext
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import Mlp, assert_same, build, inputs, weights_of


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("config", [None, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}])
def test_a_model_is_built_in_deepspeeds_context(rank: int, world_size: int, config: Any) -> None:
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) as context:
        module = Mlp()
    group = context.get_dp_process_group()
    assert (context.get_partition_rank(), group is None or group.size()) == (rank, world_size)
    torch.manual_seed(0)
    plain = Mlp()
    with deepspeed.zero.GatheredParameters(module):
        assert_same(dict(module.named_parameters()), dict(plain.named_parameters()))
    engine = deepspeed.initialize(model=module, config={"device": "emulated", "rank_timeout": 60.0, "stage": 3})[0]
    with torch.no_grad():
        assert torch.equal(engine(inputs(0)), plain(inputs(0)))


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("shard_param", [True, False])
def test_a_model_is_built_with_colossals_arguments(rank: int, world_size: int, shard_param: bool) -> None:
    """`seed` and `default_dtype` count inside only; what is counted is the model's number of elements."""
    group = dist.group.WORLD if world_size > 1 else None
    count = torch.zeros(1, dtype=torch.int)
    before = torch.get_rng_state()
    with gemini.ZeroInitContext(
        shard_param=shard_param,
        convert_fp16=True,  # fp64 is never rounded
        seed=5,
        default_dtype=torch.float64,
        model_numel_tensor=count,
        dp_process_group=group,
    ):
        module = Mlp()
        assert torch.zeros(1).dtype is torch.float64
        more = nn.Linear(2, 2).double()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(5)
        plain = Mlp()
    finally:
        torch.set_default_dtype(torch.float32)
    with gemini.GatheredParameters(module):
        found = {name: value.detach().clone() for name, value in module.named_parameters()}
    assert_same(found, {name: value.detach() for name, value in plain.named_parameters()})
    assert int(count) == sum(value.numel() for value in plain.parameters()) + sum(p.numel() for p in more.parameters())


@pytest.mark.parametrize("argument", [{"convert_fp16": True}, {"bf16": True}], ids=str)
def test_colossals_flags_say_the_dtype_of_what_is_built(argument: dict[str, Any]) -> None:
    with gemini.ZeroInitContext(**argument):
        module = nn.Linear(4, 4)
    with gemini.GatheredParameters(module):
        assert module.weight.dtype is (torch.float16 if "convert_fp16" in argument else torch.bfloat16)


@pytest.mark.parametrize("name", ["convert_cuda", "shard_grad", "rm_torch_payload_on_the_fly"])
def test_what_has_no_effect_in_colossals_context_is_said(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"ZeroInitContext\({name}=True\) has no effect: ") as told:
        gemini.ZeroInitContext(**{name: True})
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemini.ZeroInitContext(**{name: False})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"convert_fp16": True, "bf16": True}, ValueError, "dtype, convert_fp16 and bf16 ask for different dtypes"),
        ({"convert_fp16": True, "dtype": torch.bfloat16}, ValueError, "ask for different dtypes"),
        ({"convert_fp16": 1}, TypeError, "convert_fp16 must be True or False, found 1"),
        ({"seed": "5"}, TypeError, "seed must be an integer or None, found '5'"),
        ({"model_numel_tensor": 0}, TypeError, "model_numel_tensor must be a tensor of one integer, found 0"),
        ({"default_dtype": torch.int8}, ValueError, "default_dtype must be None or one of"),
        ({"convert_fp61": True}, TypeError, "no argument 'convert_fp61'"),
    ],
    ids=str,
)
def test_what_colossals_context_cannot_take_is_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        gemini.ZeroInitContext(**arguments)


def test_every_argument_of_deepspeeds_context_is_known() -> None:
    """Those of DeepSpeed 0.19.8's `zero.Init`, in its order as far as they may be given without a name."""
    shared = ["module", "data_parallel_group", "mem_efficient_linear", "remote_device", "pin_memory"]
    shared += ["config_dict_or_path", "config", "enabled", "dtype", "mpu"]
    others = ["zero_param_parallel_group", "zero_quantized_weights", "zero_quantized_nontrainable_weights"]
    others += ["sequence_data_parallel_group", "param_swapper", "tensor_overrides"]
    ours = [name for name in inspect.signature(deepspeed.zero.Init).parameters if name != "without_effect"]
    assert ours[:10] == shared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in others:
            deepspeed.zero.Init(enabled=False, **{name: False})


def test_a_config_says_the_dtype_of_what_is_built() -> None:
    with deepspeed.zero.Init(config={"bf16": {"enabled": True}}):
        module = nn.Linear(4, 4)
    with gemini.GatheredParameters(module):
        assert module.weight.dtype is torch.bfloat16


@on_ranks(1, 2)
def test_a_module_that_exists_is_sharded_at_once(rank: int, world_size: int) -> None:
    module = build()
    deepspeed.zero.Init(module=module)
    assert all(type(parameter) is not nn.Parameter for parameter in module.parameters())
    with deepspeed.zero.GatheredParameters(module):
        assert_same(dict(module.named_parameters()), dict(build().named_parameters()))


@pytest.mark.parametrize(
    "argument",
    [
        {"pin_memory": True},
        {"mem_efficient_linear": False},
        {"param_swapper": "of mine"},
        {"zero_quantized_weights": True},
    ],
    ids=str,
)
def test_what_has_no_effect_is_said(argument: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=f"{next(iter(argument))}=...\\) has no effect: ") as told:
        deepspeed.zero.Init(**argument)
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("argument", "error", "words"),
    [
        ({"remote_device": "nvme"}, ConfigError, "needs a config whose offload_param has nvme_path"),
        ({"remote_device": "gpu"}, ConfigError, "must be 'cpu', 'nvme' or 'none'"),
        ({"remote_devices": "cpu"}, TypeError, "no argument 'remote_devices'"),
        ({"config": {"zero_optimization": {"stag": 3}}}, ConfigError, "zero_optimization.stage"),
    ],
    ids=str,
)
def test_what_is_not_here_is_refused(argument: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        deepspeed.zero.Init(**argument)


@pytest.mark.filterwarnings("error")
def test_the_context_is_ours() -> None:
    assert isinstance(deepspeed.zero.Init(enabled=False), ZeroInitContext)


LAUNCHERS: dict[str, dict[str, str]] = {"torchrun": {"TORCHELASTIC_RUN_ID": "1"}, "deepspeed": {}}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_context_joins_the_ranks_that_a_launcher_started(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    """As DeepSpeed's does: its scripts build their model first, and `initialize` must find the same ranks."""
    started = {**LAUNCHERS[launcher], "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**started, "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    deepspeed.zero.Init(enabled=False)
    assert not dist.is_initialized()
    try:
        with deepspeed.zero.Init():
            module = Mlp()
        group = dist.group.WORLD
        engine = deepspeed.initialize(model=module, config={"device": "emulated", "optimizer": {"type": "HybridAdam"}})[
            0
        ]
        assert dist.group.WORLD is group
        engine.backward(engine(inputs(0)).sum())
        engine.step()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_may_be_left_apart(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    for name, value in {**LAUNCHERS[launcher], "RANK": "0", "WORLD_SIZE": "2", "GEMINI_NO_LAUNCH": "1"}.items():
        monkeypatch.setenv(name, value)
    engine = gemini.initialize(build(), config={"device": "emulated"}, verbose=False)[0]
    assert engine.model.world_size == 1 and not dist.is_initialized()


def test_ranks_are_joined_with_deepspeeds_arguments_and_no_others() -> None:
    """Without torchrun there is nothing to join."""
    deepspeed.init_distributed("nccl", auto_mpi_discovery=False, distributed_port=29501, init_method="env://")
    assert not dist.is_initialized()
    with pytest.raises(
        TypeError, match=r"init_distributed\(\) has no argument 'dist_port'; the nearest valid name is 'd"
    ):
        deepspeed.init_distributed(dist_port=29501)


def test_a_launcher_keeps_the_config_for_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_config", None)
    gemini.launch_from_torch(config={"stage": 1, "device": "emulated"}, verbose=False)
    assert gemini.initialize(build(), verbose=False)[0].model.settings.stage == 1
    gemini.launch_from_torch(verbose=False)
    assert gemini.initialize(build(), verbose=False)[0].model.settings.stage == 3


def test_arguments_of_a_script_name_the_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path), "--local_rank", "0"])
    engine = deepspeed.initialize(given, build())[0]
    assert engine.zero_optimization_stage() == 2
    with pytest.raises(ConfigError, match=r"needs one config.* found 2"):
        deepspeed.initialize(given, build(), config={})
    with pytest.raises(ConfigError, match=r"needs one config.* found 0"):
        deepspeed.initialize(model=build())
    assert weights_of(engine.model)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-006,9],login1", "gpu003"), ("gpu7", "gpu7"), ("a,b[1-2]", "a"), ("n[12]", "n12"), ("", "localhost")],
)
def test_the_first_node_of_a_slurm_job_is_found(nodes: str, first: str) -> None:
    assert launch._first_node(nodes) == first


def test_outside_slurm_its_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(RuntimeError, match=r"SLURM_PROCID.* not set: start the script with srun"):
        gemini.launch_from_slurm()


@on_ranks(1, 2)
@pytest.mark.parametrize("shards", [True, False])
def test_the_context_tells_how_many_elements_were_built(rank: int, world_size: int, shards: bool) -> None:
    with gemini.ZeroInitContext(target_device="cpu", shard_param=shards) as context:
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    assert context.model_numel_tensor.item() == 72 + 18
    assert gemini.ZeroInitContext().model_numel_tensor.item() == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GeminiDDP", "use gemini.ShardedModel"),
        ("ZeroDDP", "use gemini.ShardedModel"),
        ("ShardedModelV2", "use gemini.ShardedModel"),
        ("ShardedOptimizerV2", "use gemini.ShardedOptimizer"),
        ("GeminiAdamOptimizer", "gemini.HybridAdam"),
        ("ColoInitContext", "use gemini.ZeroInitContext"),
        ("get_current_device", r"use gemini.current_device\(\)"),
        ("Booster", "use gemini.initialize"),
    ],
)
def test_a_name_of_colossals_says_what_to_use(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=rf"'gemini' has no attribute '{name}': .*{words}"):
        getattr(gemini, name)
    with pytest.raises(ImportError, match=words):
        exec(f"from gemini import {name}", {})


def test_another_name_is_pythons_own_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'gemini' has no attribute 'nothing_of_theirs'$"):
        _ = gemini.nothing_of_theirs
    with pytest.raises(ImportError, match="cannot import name 'nothing_of_theirs'"):
        exec("from gemini import nothing_of_theirs", {})
