"""An optimizer or a schedule as a config says it: a name and arguments, tried on a parameter of one element."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn
from torch.optim import lr_scheduler

from gemini.engine.config.nearest import nearest
from gemini.engine.config.problem import problems_of
from gemini.engine.config.schedules import SCHEDULES
from gemini.optimizer.torch_update import TESTED
from optim import CPUAdam, HybridAdam

T = TypeVar("T")
_KINDS: tuple[type[torch.optim.Optimizer], ...] = (HybridAdam, CPUAdam, *TESTED)
OPTIMIZERS = {each.__name__.lower(): each for each in _KINDS}
_ONE_BIT = "its exchange of 1-bit gradients does not exist here: HybridAdam with communication in 16 bits is nearest"
_NOT_HERE = {
    "onebitadam": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "lamb": "it looks at whole tensors, and chunks may cut them: only optimizers that work element by element do",
    "muon": "it looks at whole matrices, and chunks may cut them: only optimizers that work element by element do",
    "muadam": "its learning rates by shape are not here: give param groups of HybridAdam",
    "muadamw": "its learning rates by shape are not here: give param groups of HybridAdam",
    "musgd": "its learning rates by shape are not here: give param groups of SGD",
    "lion": "PyTorch has none: give initialize() an optimizer of your own",
}
# DeepSpeed has these under names of its own.
_SAME_AS = {"fusedadam": "HybridAdam", "deepspeedcpuadam": "CPUAdam"}


class Named(BaseModel):
    """A name and arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class OptimizerConfig(Named):
    """The optimizer."""

    # The fields stand here and below once more for their descriptions, which docs/config.md prints.
    type: str
    """HybridAdam, CPUAdam, or an optimizer of torch.optim that works element by element."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments besides the parameters."""

    @model_validator(mode="after")
    def _try(self) -> Self:
        # Wrong arguments are found when the config is read, on all ranks and before the model is wrapped.
        self.make([_one_element()])
        return self

    def make(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer of these parameters or param groups. Raises ValueError for what it does not take."""
        # Case does not count, as for DeepSpeed's own optimizers.
        name = _SAME_AS.get(self.type.lower(), self.type).lower()
        if name in _NOT_HERE:
            raise ValueError(f"type={self.type!r} is refused: {_NOT_HERE[name]}")
        if name not in OPTIMIZERS:
            raise ValueError(_not_a_name(self.type, [each.__name__ for each in OPTIMIZERS.values()]))
        return _called(OPTIMIZERS[name], parameters, self.params)


class SchedulerConfig(Named):
    """The learning rate schedule, which moves once per optimizer step."""

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or one of torch.optim.lr_scheduler."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments besides the optimizer."""

    @model_validator(mode="after")
    def _try(self) -> Self:
        # DeepSpeed's schedules have a model of their arguments. torch's are tried on an optimizer.
        if self.type in SCHEDULES:
            try:
                SCHEDULES[self.type].model_validate(self.params)
            except ValidationError as error:
                found = problems_of(error, SCHEDULES[self.type].model_fields, ("params",))
                raise ValueError("; ".join(map(str, found))) from error
        elif self.type not in TORCH_SCHEDULES:
            raise ValueError(_not_a_name(self.type, [*SCHEDULES, *TORCH_SCHEDULES]))
        else:
            # CyclicLR and OneCycleLR refuse an optimizer that has neither `momentum` nor `betas` among its defaults.
            # SGD has the first one.
            optimizer = torch.optim.SGD([_one_element()], lr=1.0)
            _called(TORCH_SCHEDULES[self.type], optimizer, self.params)
        return self


# These take numbers only. Functions and other schedules, which some of torch's take, cannot be written into a file.
TORCH_SCHEDULES: dict[str, type[lr_scheduler.LRScheduler]] = {
    name: getattr(lr_scheduler, name)
    for name in (
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LinearLR",
        "MultiStepLR",
        "OneCycleLR",
        "PolynomialLR",
        "StepLR",
    )
}


def _one_element() -> nn.Parameter:
    # The device is named because a script may have set another default device, which a config must not allocate on.
    return nn.Parameter(torch.zeros(1, device="cpu"))


def _not_a_name(found: str, names: list[str]) -> str:
    return f"type={found!r} is not known{_nearest(found, names)} (valid: {', '.join(names)})"


def _nearest(found: str, names: list[str]) -> str:
    meant = nearest(found, names)
    return "" if meant is None else f"; the nearest is {meant!r}"


def _called(made: Callable[..., T], first: Any, arguments: Mapping[str, Any]) -> T:
    """`made(first, **arguments)`. Raises ValueError for what it does not take, in its own words."""
    # The first is what the caller gives itself; `unknown` and `kwargs` are names of ** parameters.
    _, *valid = [name for name in inspect.signature(made).parameters if name not in ("unknown", "kwargs")]
    # The names are checked before the call: Python's own error has no nearest name, and ours take unknown ones in `**`.
    for name in arguments:
        if name not in valid:
            raise ValueError(
                f"params.{name} is not an argument of {made.__qualname__}{_nearest(name, valid)} "
                f"(valid: {', '.join(valid)})"
            )
    try:
        # The call itself is the check of the values. Optimizers and schedules raise for a negative rate or a missing
        # argument.
        return made(first, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"params are not valid for {made.__qualname__}: {error}") from error
