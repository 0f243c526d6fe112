"""Answers to trainers and to torch's own wrappers that are about to wrap a sharded model once more."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gemini.access.parameter_link import any_link_of
from gemini.access.refusals import cannot_take
from gemini.errors import UnsupportedError

PREPARED = "_is_accelerate_prepared"
"""The attribute in which `Accelerator.prepare`, and so `transformers.Trainer`, looks up whether a model is prepared."""

_AUTOCAST = (
    "Accelerate's mixed_precision is not applied to a ShardedModel on several ranks: give dtype=torch.bfloat16, or "
    "another one, to ShardedModel(...), and leave mixed_precision='no' (for transformers.Trainer: bf16=False)"
)


def is_prepared(world_size: int) -> bool:
    """Whether to tell `Accelerator.prepare` that the model is prepared. On several ranks it would wrap it in DDP.

    Raises UnsupportedError if Accelerate would also put autocast around the model's forward, or is set to save and load
    models with another library's functions.
    """
    # Without a state of Accelerate, something else asks. Answer by the number of ranks alone. The shared dict is read,
    # because `AcceleratorState()` would make a state.
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.AcceleratorState._shared_state:
        return world_size > 1
    state = accelerate.AcceleratorState()
    kind: str = state.distributed_type.value
    # "NO" and "MULTI_GPU", "MULTI_CPU" and so on are plain processes. Other kinds, such as "FSDP" and "DEEPSPEED",
    # prepare and save models by functions of their own.
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UnsupportedError(
            f"Accelerate is set to {kind}, whose functions cannot prepare, save or load a ShardedModel: choose its "
            "plain training on several processes (torchrun, or accelerate launch --multi_gpu), and give stage= and the "
            "budgets to ShardedModel(...)"
        )
    # Accelerate wraps nothing in a single process. Where each of several processes has a whole model of its own, this
    # answer lets DDP follow, which `refuse_ddp` refuses by name.
    if world_size == 1 and (kind == "NO" or state.num_processes > 1):
        return False
    if state.mixed_precision != "no":
        raise UnsupportedError(_AUTOCAST)
    return True


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is a `DTensor`, as `fully_shard` makes them. Does not import DTensor, which takes long."""
    dtensors = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and isinstance(tensor, dtensors.DTensor)


@functools.cache
def refuse_ddp() -> RemovableHandle:
    """Register a hook, once per process, that refuses to put a sharded model into `DistributedDataParallel`.

    The hook runs when DDP registers its module, before it has touched any parameter. The module may contain a sharded
    model anywhere.
    """
    return register_module_module_registration_hook(_check_ddp)


def _check_ddp(parent: nn.Module, name: str, module: Any) -> None:
    if not isinstance(parent, DistributedDataParallel):
        return
    # DDP has filled `parameters_to_ignore` by now, with names as in `module`.
    for name_of_parameter, parameter in module.named_parameters():
        if any_link_of(parameter) is not None and name_of_parameter not in parent.parameters_to_ignore:
            raise cannot_take("DistributedDataParallel", name_of_parameter)
