"""`deepspeed.runtime.zero.stage_1_and_2`: as `stage3.py`, for stage 2."""

from __future__ import annotations

from torch import nn

from gemini.deepspeed.runtime.zero.stage3 import module_of, print_needs
from gemini.elsewhere import refusing

__all__ = ["estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live"]

_LAYERS = 64  # of a model of which only the number of parameters is known


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_live`, at stage 2. Local. Raises what `estimate_memory` raises."""
    print_needs(model, 2, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_cold`, at stage 2, for a model of 64 equal layers. Local."""
    print_needs(module_of(total_params, -(-int(total_params) // _LAYERS)), 2, num_gpus_per_node, num_nodes)


__getattr__ = refusing(__name__)
