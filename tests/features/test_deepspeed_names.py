"""What scripts for DeepSpeed import from its modules: the same paths under `gemini.deepspeed`."""

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from packaging.version import Version
from torch import nn

import gemini
from gemini import ConfigError, deepspeed
from gemini.deepspeed import comm as dist
from gemini.deepspeed.accelerator import get_accelerator
from gemini.deepspeed.runtime.utils import see_memory_usage
from gemini.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, OffloadDeviceEnum, ZeroStageEnum
from gemini.deepspeed.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from gemini.deepspeed.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from gemini.deepspeed.utils import (
    RepeatingLoader,
    get_z3_leaf_modules,
    log_dist,
    logger,
    set_z3_leaf_module,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    z3_leaf_module,
)
from tests.harness.on_ranks import gathered, on_ranks


@on_ranks(1, 2)
def test_collectives_are_torchs_and_one_rank_needs_no_group(rank: int, world_size: int) -> None:
    assert (dist.get_rank(), dist.get_world_size(), dist.is_initialized()) == (rank, world_size, world_size > 1)
    count, mine = torch.ones(1), torch.full((1,), float(rank))
    dist.all_reduce(count, op=dist.ReduceOp.SUM)
    dist.broadcast(mine, 0)
    dist.barrier()
    assert (int(count), int(mine)) == (world_size, 0)
    assert dist.all_gather_object is torch.distributed.all_gather_object


def test_the_accelerator_answers_for_the_device() -> None:
    device = get_accelerator()
    assert deepspeed.get_accelerator() is device and device.is_available()
    tensor = torch.ones(1, device=device.device_name())
    assert device.on_accelerator(tensor) and tensor.device.type == gemini.current_device().type
    assert device.device_count() >= 1 and device.current_device() < device.device_count()
    assert 0 < device.memory_allocated() <= device.total_memory()
    assert device.is_bf16_supported() and device.is_fp16_supported()
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory_stats()
    device.manual_seed(5)
    first = torch.rand(1)
    device.manual_seed(5)
    assert torch.equal(torch.rand(1), first)
    device.manual_seed_all(5)
    assert torch.equal(torch.rand(1), first)
    with pytest.raises(AttributeError, match=r"get_accelerator\(\) has no 'op_builder_dir': .*torch.accelerator"):
        device.op_builder_dir()


@contextlib.contextmanager
def kept(of: logging.Logger) -> Iterator[list[str]]:
    """What the logger writes inside."""
    seen: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    keeps = Keeps()
    of.addHandler(keeps)
    try:
        yield seen
    finally:
        of.removeHandler(keeps)


@on_ranks(1, 2)
def test_a_line_is_logged_on_the_ranks_that_are_named(rank: int, world_size: int) -> None:
    assert deepspeed.logger is logger and logger is logging.getLogger("DeepSpeed")
    with kept(logger) as seen:
        log_dist("last", ranks=[world_size - 1])
        log_dist("all", ranks=[-1])
        logger.warning("here")
    names = ["Rank -1"] if world_size == 1 else ["Rank 0", "Rank 1"]
    wanted = [[f"[{name}] last", f"[{name}] all", "here"] for name in names]
    assert gathered(seen) == ([wanted[0][1:], wanted[1]] if world_size > 1 else wanted)


@on_ranks(1, 2)
def test_memory_is_logged_where_it_is_forced(rank: int, world_size: int) -> None:
    with kept(logging.getLogger("gemini")) as seen:
        see_memory_usage("never said")
        see_memory_usage("before training", force=True)
    assert len(seen) == (rank == 0)
    assert all("before training: cpu allocated " in line and line.endswith(" in use") for line in seen)


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 4)) for _ in range(2)))


def test_leaves_are_set_by_name_and_by_suffix() -> None:
    model = blocks()
    assert set_z3_leaf_modules_by_name(model, ["0", "2"], raise_if_not_found=False) == ([model[0]], ["2"])
    assert get_z3_leaf_modules(model) == [model[0]] and z3_leaf_module(model[0]) and not z3_leaf_module(model[1])
    set_z3_leaf_modules_by_name(model, ["0"], flag=False)
    assert set_z3_leaf_modules_by_suffix(model, [".1"]) == ([model[0][1], model[1][1]], [])
    with pytest.raises(ValueError, match="no module of Sequential is called 7, 8"):
        set_z3_leaf_modules_by_name(model, ["7", "8"])
    set_z3_leaf_module(model[1], True)
    assert get_z3_leaf_modules(model) == [model[0][1], model[1], model[1][1]]


def test_a_loader_repeats() -> None:
    batches = RepeatingLoader([1, 2])
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


def test_a_section_is_an_object_and_becomes_a_config() -> None:
    section = DeepSpeedZeroConfig(stage=3, offload_param={"device": "cpu"}, stage3_max_live_parameters=1e6)
    assert section.stage == ZeroStageEnum.weights and section.offload_param.device == OffloadDeviceEnum.cpu
    assert (section.max_live_parameters, section.offload_optimizer, section.overlap_comm) == (1e6, None, None)
    assert DeepSpeedZeroConfig().stage == ZeroStageEnum.disabled
    config = {"zero_optimization": section.model_dump(), "optimizer": {"type": "Adam"}}
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=config)[0]
    assert engine.zero_optimization_stage() == 3
    with pytest.raises(ConfigError, match="stag is not a key"):
        DeepSpeedZeroConfig(stag=3)
    with pytest.raises(AttributeError, match="DeepSpeedZeroConfig has no 'stag'"):
        _ = section.stag


@pytest.mark.parametrize("stage", [2, 3])
def test_estimates_are_printed_of_a_model_and_of_two_numbers(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight layers of 2**20: of all, two bytes a weight are on every device at stage 2, and an eighth at stage 3."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8 * 16)))
    numel = 2**27
    live, cold = {
        2: (estimate_zero2_model_states_mem_needs_all_live, estimate_zero2_model_states_mem_needs_all_cold),
        3: (estimate_zero3_model_states_mem_needs_all_live, estimate_zero3_model_states_mem_needs_all_cold),
    }[stage]
    live(model, num_gpus_per_node=8)
    of_model = rows(capsys.readouterr().out)
    arguments = (numel,) if stage == 2 else (numel, 2**20)
    cold(*arguments, num_gpus_per_node=8)  # type: ignore[arg-type]
    of_numbers = rows(capsys.readouterr().out)
    both, optimizer, none = (
        "offload_param=cpu, offload_optimizer=cpu",
        "offload_optimizer=cpu",
        "offload_optimizer=none",
    )
    for found in (of_model, of_numbers):
        host, device = zip(*found.values(), strict=True)
        assert [
            option.endswith(end) for option, end in zip(found, [both, optimizer, none][3 - len(found) :], strict=True)
        ]
        assert list(device) == sorted(device) and list(host) == sorted(host, reverse=True)
    # Weights, gradients, masters and moments, in GiB: 2, 2, 2 and 8 bytes a parameter, all but weights over 8 ranks.
    weights = 2 * numel / 2**30 / (8 if stage == 3 else 1)
    least = weights + 12 * numel / 8 / 2**30
    assert least <= list(of_model.values())[-1][1] <= least + 0.1
    assert list(of_model.values())[-1][0] == 0


def rows(text: str) -> dict[str, tuple[float, float]]:
    """GiB of a node's host and of a device, by option."""
    lines = [line.split(" | ") for line in text.splitlines()[2:]]
    return {option: (float(host.strip(" GB")), float(device.strip(" GB"))) for host, device, option in lines}


def test_a_script_may_ask_for_the_version_of_its_names() -> None:
    assert Version(deepspeed.__version__) >= Version("0.16")


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("", "PipelineModule", "sharded over all ranks"),
        ("", "init_inference", "gathered_for_generation"),
        ("", "nothing_of_theirs", "docs/coming_from.md"),
        (".comm", "log_summary", "torch.profiler"),
        (".comm", "nothing_of_theirs", "torch.distributed"),
        (".utils", "groups", "other groups are those of your own DeviceMesh"),
        (".runtime", "activation_checkpointing", "torch.utils.checkpoint"),
        (".runtime.utils", "clip_grad_norm_", "gemini.clip_grad_norm_"),
        (".runtime.zero", "TiledLinearReturnBias", "gemini.TiledLinear"),
        (".runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "gemini.ShardedOptimizer"),
        (".ops", "FusedLamb", r"gemini\.per_tensor"),
        (".ops.adam", "FusedLamb", r"gemini\.per_tensor"),
    ],
)
def test_a_name_of_deepspeeds_that_is_not_here_says_what_to_use(module: str, name: str, words: str) -> None:
    there: Any = importlib.import_module(f"gemini.deepspeed{module}")
    with pytest.raises(AttributeError, match=rf"gemini.deepspeed{module} has no '{name}': .*{words}"):
        getattr(there, name)
    assert not hasattr(there, name)


def test_an_import_says_what_to_use_too() -> None:
    """`from package import name` drops the text of an AttributeError."""
    with pytest.raises(ImportError, match="'PipelineModule': there is no pipeline"):
        from gemini.deepspeed import PipelineModule  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing_of_theirs'"):
        from gemini.deepspeed import nothing_of_theirs  # noqa: F401


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("pipe", "gemini.deepspeed has no module 'pipe': there is no pipeline"),
        ("moe.layer", "gemini.deepspeed.moe has no module 'layer': experts are sharded as all weights are"),
        ("runtime.pipe.engine", "gemini.deepspeed.runtime has no module 'pipe': there is no pipeline"),
        ("compression.compress", "compression has no module 'compress': it changes the model's result"),
        ("nothing_of_theirs", "has no module 'nothing_of_theirs': docs/coming_from.md"),
    ],
)
def test_a_module_of_deepspeeds_that_is_not_here_says_what_to_use(module: str, words: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(f"gemini.deepspeed.{module}")


def test_what_scripts_import_is_there() -> None:
    """Of the modules that DeepSpeedExamples import from, also where they use nothing of it."""
    from gemini.deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from gemini.deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer
    from gemini.deepspeed.runtime.engine import DeepSpeedEngine
    from gemini.deepspeed.runtime.lr_schedules import WarmupLR
    from gemini.deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    assert (DeepSpeedEngine, GatheredParameters) == (deepspeed.DeepSpeedEngine, deepspeed.zero.GatheredParameters)
    assert ZeroParamStatus.AVAILABLE is not ZeroParamStatus.NOT_AVAILABLE
    model = blocks()
    recursive_setattr(model, "1.0", nn.Identity())
    assert recursive_getattr(model, "1.0") is model[1][0] and isinstance(model[1][0], nn.Identity)
    group = {"params": list(model.parameters()), "name": "parameters"}
    assert split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert has_moe_layers(model) == (False, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = WarmupLR(optimizer, warmup_max_lr=0.5, warmup_num_steps=2, warmup_type="linear")
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.0]
    with pytest.raises(ValueError, match="warmup_steps"):
        WarmupLR(optimizer, warmup_steps=2)
    with pytest.raises(ValueError, match="load_state_dict"):
        WarmupLR(optimizer, last_batch_iteration=7)
