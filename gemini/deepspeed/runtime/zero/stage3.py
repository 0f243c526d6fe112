"""`deepspeed.runtime.zero.stage3`: the memory that training takes at a stage, printed for each kind of offloading."""

from __future__ import annotations

import torch
from torch import nn

from gemini.elsewhere import refusing
from gemini.model.estimate import estimate_memory, num_parameters_of
from gemini.placement.demand import Kind
from gemini.placement.policies import OptimizerOnHostPolicy

__all__ = ["estimate_zero3_model_states_mem_needs_all_cold", "estimate_zero3_model_states_mem_needs_all_live"]

_OPTIONS: dict[str | OptimizerOnHostPolicy, str] = {
    "cpu": "offload_param=cpu, offload_optimizer=cpu",
    OptimizerOnHostPolicy(): "offload_param=none, offload_optimizer=cpu",
    "cuda": "offload_param=none, offload_optimizer=none",
}


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what training the model at stage 3 takes, in bf16 with Adam and without activations. Local.

    Args:
        model: a module that is not wrapped, on any device. Nothing is allocated.
        num_gpus_per_node: ranks that share a host's memory.
        num_nodes: hosts.
        additional_buffer_factor: has no effect: the bytes are those that the plan of such a training takes.

    Raises what `gemini.estimate_memory` raises, which has the same numbers for other settings.
    """
    print_needs(model, 3, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_live`, for a model of which only two numbers are known. Local.

    Args:
        total_params: elements of all parameters.
        largest_layer_params: elements of the largest layer; the others are counted as layers of that size.
        num_gpus_per_node, num_nodes, additional_buffer_factor: as there.
    """
    print_needs(module_of(total_params, largest_layer_params), 3, num_gpus_per_node, num_nodes)


def module_of(total_params: int, layer_params: int) -> nn.Module:
    """A module without memory of so many elements, in layers of this size and one with the rest. Local."""
    whole, rest = divmod(int(total_params), int(layer_params))
    sizes = [int(layer_params)] * whole + [rest] * (rest > 0)
    return nn.Sequential(*(nn.Linear(size, 1, bias=False, device="meta") for size in sizes))


def print_needs(model: nn.Module, stage: int, num_gpus_per_node: int, num_nodes: int) -> None:
    """Print a row for each kind of offloading: bytes of a node's host memory, and of each device. Local."""
    estimates = {
        policy: estimate_memory(
            model,
            world_size=num_gpus_per_node * num_nodes,
            stage=stage,
            dtype=torch.bfloat16,
            tensor_placement_policy=policy,
        )
        for policy in _OPTIONS
    }
    # With all states on the host a device holds what it computes with: slots and buffers, of which some are enough.
    working_bytes = estimates["cpu"].plan.minimum_bytes or 0
    print(
        f"Training {num_parameters_of(model):,} parameters at stage {stage} takes, in bf16 with fp32 masters and "
        f"Adam, without activations, on {num_nodes} node(s) of {num_gpus_per_node} GPU(s):\n"
        "  per node's CPU |   per GPU, at least | options"
    )
    for policy, estimate in estimates.items():
        # Below stage 3 DeepSpeed keeps parameters on the device, and has no such option.
        if policy == "cpu" and stage < 3:
            continue
        device_bytes = sum(estimate.device[kind] for kind in Kind) + working_bytes
        host_bytes = estimate.host_bytes * num_gpus_per_node
        print(f"  {host_bytes / 2**30:>12.2f}GB | {device_bytes / 2**30:>17.2f}GB | {_OPTIONS[policy]}")


__getattr__ = refusing(__name__)
