"""Checks of the arguments of `ShardedModel`, before anything has changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gemini.access.gradient import own_grad
from gemini.access.link import link_of
from gemini.access.refusals import cannot_take
from gemini.building.link import built_link_of
from gemini.chunks.chunk import ManagedParameter
from gemini.errors import GeminiError, UnsupportedError
from gemini.model.move_out import LOST
from gemini.model.parametrization import is_parametrized
from gemini.model.wrappers import is_dtensor
from gemini.script import warn_at_script


def check_module(by_name: Mapping[str, nn.Parameter], ignored: Collection[nn.Parameter]) -> None:
    """Raises UnsupportedError; looks at a module's parameters without reading them. Warns of gradients they have."""
    num_gradients = 0
    for name, parameter in by_name.items():
        if parameter in ignored:
            continue
        if link_of(parameter) is not None:
            raise UnsupportedError(f"parameter {name!r} already belongs to a ShardedModel: wrap a module once")
        # Not `.grad`, which of a parameter that was built on shards is None, whatever autograd has accumulated.
        num_gradients += own_grad(parameter) is not None
        # Parameters that were built on shards have a class of ours, which the checks below would refuse.
        if built_link_of(parameter) is not None:
            continue
        # An earlier wrap failed and lost the weights. What the parameter shows is a placeholder.
        if hasattr(parameter, LOST):
            raise UnsupportedError(f"parameter {name!r} lost its values when wrapping failed: build the module again")
        if is_lazy(parameter) or parameter.is_meta:
            raise UnsupportedError(f"parameter {name!r} has no data yet ({type(parameter).__name__} on meta or lazy)")
        # A subclass, such as a DTensor or a quantised weight, may hold its values elsewhere than in strided memory.
        if type(parameter) is not nn.Parameter:
            raise UnsupportedError(f"parameter {name!r} is a {type(parameter).__name__}, not a plain nn.Parameter")
        if parameter.layout is not torch.strided:
            raise UnsupportedError(f"parameter {name!r} is {parameter.layout}; only strided tensors can be in a chunk")
    if num_gradients:
        warn_at_script(
            f"{num_gradients} parameters have a gradient of a backward before ShardedModel(...), which drops it: their "
            ".grad is None then. Call zero_grad() before the model is wrapped, or backward() after it",
        )


def check_wrapped(
    module: nn.Module, managed: Iterable[ManagedParameter], ignored: Collection[nn.Parameter], world_size: int
) -> None:
    """Check that the module still has exactly the parameters that were wrapped. Local.

    Raises GeminiError if one was added or replaced since, or moved into a parametrization on several ranks.
    """
    wrapped = {each.parameter: each.name for each in managed}
    for name, parameter in module.named_parameters():
        # A parametrization keeps the parameter object under another name, and may add buffers that differ by rank.
        known = wrapped.get(parameter)
        if known is not None and known != name and world_size > 1 and is_parametrized(name):
            raise GeminiError(
                f"parameter {known!r} became {name!r} after ShardedModel(...). On several ranks put parametrizations "
                "and pruning onto the module before it is wrapped: their buffers, which may be random, are rank 0's "
                "then"
            )
        if known is None and parameter not in ignored:
            if is_dtensor(parameter):
                raise cannot_take("fully_shard, or what else makes DTensors,", name)
            raise GeminiError(
                f"parameter {name!r} was added or replaced after ShardedModel(...) and would not be trained: "
                "change the module before it is wrapped, and values with model.load_state_dict() or in place. To "
                "change a size now, load model.state_dict() into the plain module, change that, and wrap it again"
            )
