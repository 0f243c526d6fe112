"""What Accelerate and a sharded model cannot do together is told, and which of Accelerate's private names are used."""

import ast
import doctest
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from torch import nn

from gemini import ConfigError, UnsupportedError
from gemini.integrations import accelerate as integration
from gemini.integrations.accelerate import Accelerator
from optim import HybridAdam
from tests.harness.logged import logged
from tests.zoo.mlp import CHUNK_NUMEL, assert_same, build, loss_of, plain

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"device": "emulated", "chunk_size": CHUNK_NUMEL}


def _ours(**arguments: Any) -> Any:
    return Accelerator(cpu=True, **{"gemini": SMALL, **arguments})


def _hook() -> Any:
    return DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: {"fsdp_plugin": object()}, "^fsdp_plugin= shards .*accelerate launch --multi_gpu"),
        (lambda: {"deepspeed_plugin": object()}, "^deepspeed_plugin= shards"),
        (lambda: {"megatron_lm_plugin": object()}, "^megatron_lm_plugin= shards"),
        (lambda: {"parallelism_config": object()}, "^parallelism_config= must be a ParallelismConfig, found object"),
        (
            lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
            "tp_size=2 divides .*parallelize_module",
        ),
        (lambda: {"parallelism_config": ParallelismConfig(cp_size=2)}, "cp_size=2 divides batches"),
        (lambda: {"torch_tp_plugin": object()}, "^torch_tp_plugin= shards"),
        (lambda: {"mixed_precision": "fp8"}, "^mixed_precision='fp8' .* no, bf16, fp16"),
        (lambda: {"kwargs_handlers": [_hook()]}, "^a comm_hook .*reduce_dtype='bf16'"),
    ],
    ids=["fsdp", "deepspeed", "megatron", "parallelism", "tensors", "context", "tp-plugin", "fp8", "comm-hook"],
)
def test_plugins_that_shard_themselves_are_refused_by_name(
    arguments: Callable[[], dict[str, Any]], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _ours(**arguments())


def test_a_launcher_that_is_set_to_such_a_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UnsupportedError, match=r"^ACCELERATE_USE_FSDP=true, as `accelerate launch` sets it"):
        _ours()
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert _ours().mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"dtype": "fp16"}, {"mixed_precision": "bf16"}, "^mixed_precision is 'bf16', and the config says dtype="),
        ({"optimizer": {"type": "HybridAdam"}}, {}, "^'optimizer' in the config: .* leave it out"),
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 3}, "is 3 in .* and 2 in the config"),
        ({"stage": 4}, {}, "stage"),
    ],
    ids=["dtype", "optimizer", "accumulation", "stage"],
)
def test_a_config_that_contradicts_the_script_is_refused(
    config: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _ours(gemini=config, **arguments)


def test_batch_sizes_of_a_config_say_how_many_micro_batches_make_a_step() -> None:
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    with logged() as text:
        assert _ours(gemini=sizes).gradient_accumulation_steps == 4
    assert "without effect: train_micro_batch_size_per_gpu: the data loader decides" in text.getvalue()
    with pytest.raises(ConfigError, match=r"is 3 in .* and 4 in the config, or by its batch sizes"):
        _ours(gemini=sizes, gradient_accumulation_steps=3)


def test_an_optimizer_of_another_model_is_refused_before_anything_changes() -> None:
    model, other = build(), build()
    with pytest.raises(UnsupportedError, match="parameters of HybridAdam are not all of one model"):
        _ours().prepare(model, HybridAdam([*model.parameters(), *other.parameters()]))
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    assert type(next(model.parameters())) is nn.Parameter
    with pytest.raises(UnsupportedError, match=r"give prepare\(\) the model together with it"):
        _ours().prepare(HybridAdam(model.parameters()))


def test_several_optimizers_of_one_model_that_are_not_a_list_are_refused_before_anything_changes() -> None:
    model = build()
    parameters = list(model.parameters())
    optimizers = HybridAdam(parameters[:6]), torch.optim.SGD(parameters[6:], lr=0.1)
    with pytest.raises(
        UnsupportedError, match=r"HybridAdam and SGD are of one model.*prepare\(model, \[first, second\]"
    ):
        _ours().prepare(model, *optimizers)
    assert type(next(model.parameters())) is nn.Parameter


def test_clipping_is_of_one_whole_optimizer_at_the_end_of_a_window() -> None:
    accelerator = _ours(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model := build(), HybridAdam(model.parameters()))
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model))
        with pytest.raises(UnsupportedError, match=r"if accelerator\.sync_gradients:"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, 1))
        with pytest.raises(UnsupportedError, match="of 3 parameters, and their optimizer has 12"):
            accelerator.clip_grad_norm_(list(model.parameters())[:3], 1.0)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert optimizer.optimizer.last_step.clip == pytest.approx(1e-3 / float(norm))


def test_gradients_are_clipped_by_value_as_in_plain_accelerate() -> None:
    runs = []
    for accelerator in (_ours(), accelerate.Accelerator(cpu=True)):
        model, optimizer = accelerator.prepare(*plain())
        accelerator.backward(loss_of(model))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        runs.append(dict(model.state_dict()))
    assert_same(*runs)


def test_a_state_without_its_model_is_not_saved(tmp_path: Path) -> None:
    accelerator = _ours()
    model = accelerator.prepare(build())
    accelerator.prepare(HybridAdam(model.parameters()))
    accelerator._models.clear()  # as if the model had gone to another accelerator
    with pytest.raises(UnsupportedError, match="without its model"):
        accelerator.save_state(tmp_path)
    assert not list(tmp_path.iterdir())


def test_accelerates_compilation_is_refused() -> None:
    accelerate.state.AcceleratorState._reset_state()  # it holds what the first accelerator of a process said
    with pytest.raises(UnsupportedError, match=r"dynamo_backend does not compile .* compile\(\) of the model"):
        _ours(dynamo_backend="eager").prepare(build())
    accelerate.state.AcceleratorState._reset_state()


@pytest.mark.filterwarnings("ignore:step 1 skipped")
def test_the_loss_scale_is_that_of_the_scalers_arguments() -> None:
    scaler = GradScalerKwargs(init_scale=8.0, growth_interval=1)
    accelerator = _ours(mixed_precision="fp16", kwargs_handlers=[scaler])
    model, optimizer = accelerator.prepare(model := build(), HybridAdam(model.parameters()))
    assert optimizer.optimizer.loss_scale == 8.0
    accelerator.backward(loss_of(model))
    optimizer.step()
    assert optimizer.optimizer.loss_scale == 16.0
    other, _ = accelerator.prepare(other := build(), HybridAdam(other.parameters()))
    with pytest.raises(UnsupportedError, match=r"several optimizers in fp16.*scale\(loss\)"):
        accelerator.backward(loss_of(other))


def test_a_users_accumulation_plugin_does_not_hold_whole_gradients() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = _ours(gradient_accumulation_plugin=plugin)
    assert accelerator.gradient_accumulation_steps == 4
    assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"]
    assert not accelerator.gradient_state.sync_with_dataloader


def test_the_names_of_accelerates_that_are_used_are_there() -> None:
    """Private ones, and public attributes that its documentation does not list; pinned, as they may go at any time."""
    private = {"_models", "_optimizers", "_schedulers", "_save_model_state_pre_hook"}
    public = {"ddp_handler", "gradient_state", "project_configuration", "scaler_handler", "state"}
    public |= {"step_scheduler_with_optimizer", "split_batches", "sync_gradients", "distributed_type", "device"}
    accelerator = accelerate.Accelerator(cpu=True)
    assert {name for name in private | public if hasattr(accelerator, name)} == private | public
    assert isinstance(accelerator.gradient_state.plugin_kwargs, dict)
    tree = ast.parse((ROOT / "gemini/integrations/accelerate.py").read_text())
    ours = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    ours |= {"_weights", "_mixed_precision", "_saves_whole", "_saves_parts", "_whole"}  # attributes
    ours |= {"_saving_parts", "_in_parts"}
    torchs = {"_opt_called"}
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in read if name.startswith("_") and not name.endswith("__")} - ours == private | torchs
    assert f"accelerate=={version('accelerate')}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_example_in_the_docstring_runs() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(Accelerator, globs={**vars(integration)})
    assert doctest.DocTestRunner().run(example).failed == 0


def test_sizes_that_contradict_ranks_or_config_are_refused() -> None:
    for sizes, config, words in (
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, SMALL, "for 4 ranks, and there are 1"),
        ({"dp_shard_size": 2}, SMALL, "dp_shard_size=2, for 2 ranks, and there are 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            _ours(parallelism_config=ParallelismConfig(**sizes), gemini=config)
