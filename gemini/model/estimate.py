"""The memory that training a model takes on each rank, from its shapes alone: nothing is allocated.

The estimate uses the packing and the policies of `ShardedModel`, so the bytes are exact for Adam, or for another
number of states, and one micro-batch per step. Activations are not included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import nn

from gemini.access.link import link_of
from gemini.errors import UnsupportedError
from gemini.model.operators import specs_of
from gemini.model.sharded_model import tie_aliases
from gemini.placement.budget import FreeBytes
from gemini.placement.demand import OPTIM_STATES, Kind
from gemini.placement.needs import Packed
from gemini.placement.plan import Plan
from gemini.placement.search import plan_training
from gemini.settings import Options, Settings, Strategy
from optim import FP32, format_named, format_of_tensor
from sharding import ALIGNMENT


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of model data that one rank holds, by tier and kind. The kinds are those of `model.memory_report()`.

    Args:
        num_parameters: elements of all parameters of the whole model. Tied parameters count once.
        device: bytes on the device by kind: "param", "grad", "master", "optim", "slots", "gradient slots", "scratch".
        host: bytes in host memory by kind.
        disk: bytes on the disk by kind.
    """

    num_parameters: int
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    plan: Plan = field(repr=False)  # the plan that `ShardedModel` would use; `plan.explain()` has it in words

    @property
    def device_bytes(self) -> int:
        """Bytes of all kinds on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of all kinds in host memory."""
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of all kinds on the disk."""
        return sum(self.disk.values())

    @property
    def least_device_bytes(self) -> int:
        """Bytes on the device with the same states there and buffers of the least size: weights are gathered anew."""
        least = self.plan.packed_minimum_bytes
        buffers = sum(num_bytes for kind, num_bytes in self.device.items() if kind not in list(Kind))
        return self.device_bytes - buffers + (buffers if least is None else min(buffers, least))

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, masters and optimizer state on all tiers, without slots and scratch."""
        return sum(tier[kind] for tier in (self.device, self.host, self.disk) for kind in Kind)


def estimate_memory(
    model: Any,
    *,
    world_size: int = 1,
    settings: Settings | None = None,
    shard_strategy: Strategy = None,
    optim_states: int = OPTIM_STATES,
    optimizer: str | None = None,
    **options: Unpack[Options],
) -> MemoryEstimate:
    """The bytes of model data that every rank of `ShardedModel(model, settings=settings, **options)` will hold.

    Nothing is allocated and no rank is asked: not collective. Activations are not included. With `reuse_fp16_shard`
    gradients have no memory of their own, as in steps of one micro-batch.

    Args:
        model: a module on any device, "meta" included, or the config of a Hugging Face model, whose dtype is the one
            that the config says.
        world_size: the number of ranks.
        settings: as for `ShardedModel`. A budget that is not given is no bound: free memory is not read.
        shard_strategy: as for `ShardedModel`.
        optim_states: how many states per element the optimizer keeps: 2 for Adam, 3 for amsgrad, 0 for SGD, 1 for SGD
            with momentum.
        optimizer: in place of `optim_states`: "adam", "8bit" or "bf16" for a `HybridAdam` with this `state_dtype`, or
            "sgd".
        options: fields of `Settings`, in place of those that `settings` has.

    Raises TypeError or ValueError for options that are not valid, UnsupportedError for a module that is wrapped
    already, and BudgetError if the device has no room to train it, or the host none for the weights. Where
    `host_memory` has room for the weights alone, `host_bytes` of the estimate is more than it.

    Example:
        >>> module = torch.nn.Linear(1024, 1024, device="meta")
        >>> estimate_memory(module, world_size=8, dtype=torch.bfloat16).state_bytes
        1838592
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, found {world_size!r}")
    if isinstance(optim_states, bool) or not isinstance(optim_states, int) or optim_states < 0:
        raise ValueError(f"optim_states must be an integer of at least 0, found {optim_states!r}")
    others = "model", "world_size", "optim_states", "optimizer", "settings"
    settings = Settings.of("estimate_memory", *others, settings=settings, shard_strategy=shard_strategy, **options)
    settings = settings.over(world_size)
    module = module_of(model)
    # Without free bytes: the machine at hand need not be the one that will train.
    states = optim_states if optimizer is None else states_per_element(module, optimizer)
    plan = plan_training(packed_of(module, settings, world_size), settings, FreeBytes(), states)
    return MemoryEstimate(num_parameters_of(module), *plan.bytes_by_tier, plan)


OPTIMIZERS = ("adam", "8bit", "bf16", "sgd")


def states_per_element(module: nn.Module, optimizer: str) -> float:
    """States of full precision per element that this optimizer keeps of the module, on average. Local.

    Raises ValueError for another name than those in `OPTIMIZERS`.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, found {optimizer!r}")
    if optimizer in ("adam", "sgd"):
        return OPTIM_STATES if optimizer == "adam" else 0
    tables = [each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    embeddings = {id(each.weight) for each in tables}  # membership only
    numel = num_bytes = 0
    for each in module.parameters():
        if each.requires_grad:
            its = format_of_tensor(format_named(optimizer), None, each.numel(), id(each) in embeddings)
            # With its padding, which a plan counts among the elements.
            num_blocks = -(-each.numel() // ALIGNMENT)
            numel += num_blocks * ALIGNMENT
            num_bytes += num_blocks * its.block_bytes
    return OPTIM_STATES * num_bytes / (FP32.dtype.itemsize * numel) if numel else OPTIM_STATES


def packed_of(module: nn.Module, settings: Settings, world_size: int) -> Packed:
    """The packings of `module`, for plans under several budgets. Local.

    Raises ValueError for settings that the module contradicts.
    """
    with _tied_aliases(module):
        spec = specs_of(module, settings, world_size)
    return Packed(spec, settings, world_size)


def num_parameters_of(module: nn.Module) -> int:
    """Elements of all parameters, of which tied ones count once, also those that are tied by their memory. Local."""
    with _tied_aliases(module):
        return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _tied_aliases(module: nn.Module) -> Iterator[None]:
    """Inside, parameters of the same memory are one, as wrapping makes them for good."""
    ties = tie_aliases(module)
    try:
        yield
    finally:
        for tie in ties:
            tie.undo()


def module_of(model: Any) -> nn.Module:
    """The given module, or the module that a Hugging Face config describes, built on "meta". Local.

    Raises TypeError for what is neither, and UnsupportedError for a module that is wrapped already.
    """
    if isinstance(model, nn.Module):
        if any(link_of(parameter) is not None for parameter in model.parameters()):
            raise UnsupportedError(
                "a module that is wrapped already is not planned: model.plan has its plan, or give the module as it "
                "was before wrapping"
            )
        return model
    if not hasattr(model, "model_type"):
        raise TypeError(f"model must be a torch module or a Hugging Face config, found {type(model).__name__}")
    # Imported only for a config: gemini does not depend on it.
    import transformers

    # A config names the class that it was saved from. Without one build a causal language model.
    names = getattr(model, "architectures", None) or ("",)
    build = getattr(transformers, names[0], None) or transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        built: nn.Module = build(model)
    # The class alone makes fp32, whatever the weights are that the config describes. A model of several parts may say
    # the dtype for its text alone.
    dtype = getattr(model, "dtype", None) or getattr(model.get_text_config(), "dtype", None)
    return built if dtype is None else of_dtype(built, dtype)


def of_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, whose parameters on "meta" have the dtype then. Local."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module
