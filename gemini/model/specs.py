"""Describes a module for planning. Reads only shapes, dtypes and flags, so it works on "meta" too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from gemini.model.ignored import ignored_in
from gemini.model.operators import Found, find_operators
from gemini.model.precision import ModulePrecision, weights_of
from gemini.placement.specs import ModelSpec, WeightSpec
from gemini.settings import Settings, dtype_of
from optim import HALF_DTYPES


def specs_of(module: nn.Module, settings: Settings, world_size: int) -> ModelSpec:
    """The description of a module for `plan_model`: names, shapes, dtypes and operators. Reads no values; local.

    Args:
        module: a module on any device, "meta" included.
        settings: the settings that the plan will be made with; `dtype`, `stage` and `ignored_parameters` count here.
        world_size: the number of ranks.

    Raises ValueError if a key of `dtype={...}` matches no module, two keys give a tied parameter different dtypes, or a
    pattern of `ignored_parameters` matches no parameter.

    Example:
        >>> settings = Settings(stage=2, chunk_size=4096)
        >>> spec = specs_of(torch.nn.Linear(8, 8), settings, world_size=4)
        >>> len(spec.weights)
        2
    """
    places: dict[nn.Parameter, int] = {}
    operators = find_operators(module, settings.gathers(world_size), places, ignored_in(module, settings))
    return model_spec(dict(module.named_parameters()), operators, places, weights_of(module, settings))


def model_spec(
    by_name: Mapping[str, nn.Parameter], operators: Found, places: Iterable[nn.Parameter], weights: ModulePrecision
) -> ModelSpec:
    """The specs of a module whose operators and dtypes are known.

    by_name: its parameters under their first names. places: in the order of weights.
    """
    # A tied parameter has one spec, under the first of its names, which `named_parameters()` gives.
    names = {parameter: name for name, parameter in by_name.items()}
    specs = []
    for each in places:
        dtype = weights.parameters[each]
        # The fp32 master of such a weight keeps the bits that rounding to 16 bits drops.
        is_rounded = dtype in HALF_DTYPES and each.dtype is not dtype
        specs.append(WeightSpec(names[each], tuple(each.shape), dtype_of(dtype), each.requires_grad, is_rounded))
    return ModelSpec(tuple(specs), tuple(spec for _, spec in operators))


def describe(arguments: Sequence[str], spec: ModelSpec, built: Sequence[str]) -> str:
    """What must be equal on all ranks, one fact per line, so that an error can show the first difference."""
    compiled = [operator.name for operator in spec.operators if operator.is_compiled]
    return "\n".join(
        [
            *arguments,
            *(
                f"parameter {each.name!r} of shape {each.shape}, (dtype, trainable) = {each.dtype.name, each.trainable}"
                for each in spec.weights
            ),
            f"built in a ZeroInitContext: {', '.join(built) or 'nothing'}",
            f"compiled: {', '.join(compiled) or 'nothing'}",
        ]
    )
