"""Adam's hyperparameters: their valid values, and the errors for others.

They are checked where they are given (constructor, `add_param_group`, `load_state_dict`) and again at every step,
because schedulers and users write into param groups. A learning rate may be a one-element tensor, as in torch.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from torch import Tensor


class AdamHyperparameters(TypedDict):
    """The keyword arguments of `adam_scalars` that a param group fixes."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    adamw_mode: bool
    bias_correction: bool
    maximize: bool


def hyperparameters(group: Mapping[str, Any]) -> AdamHyperparameters:
    """The keyword arguments of `adam_scalars` from a param group, checked, as plain numbers.

    Raises ValueError for an invalid hyperparameter.
    """
    # Groups of torch's optimizers have the key, and so may those of a state dict.
    if group.get("amsgrad"):
        raise ValueError("amsgrad must be False, found True: the maximum of past second moments is not kept")
    beta1, beta2 = _pair(group["betas"])
    return AdamHyperparameters(
        lr=_number("lr", group["lr"]),
        betas=(_number("betas[0]", beta1, 1.0), _number("betas[1]", beta2, 1.0)),
        eps=_number("eps", group["eps"]),
        weight_decay=_number("weight_decay", group["weight_decay"]),
        adamw_mode=_flag("adamw_mode", group["adamw_mode"]),
        bias_correction=_flag("bias_correction", group["bias_correction"]),
        maximize=_flag("maximize", group["maximize"]),
    )


def refuse_unknown_arguments(owner: str, unknown: Iterable[str], valid: Iterable[str]) -> None:
    """Raise a TypeError that names the first unknown argument and the valid name nearest to it."""
    valid = list(valid)
    for name in unknown:
        # With a cutoff of 0 there is always a nearest name.
        nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
        raise TypeError(
            f"{owner}() has no argument {name!r}; the nearest valid name is {nearest[0]!r} (valid: {', '.join(valid)})"
        )


def _number(name: str, value: object, limit: float = math.inf) -> float:
    number = _real(value)
    # False for NaN and, with a limit of infinity, for infinity: both are refused.
    if number is None or not 0.0 <= number < limit:
        valid = "finite number >= 0" if limit == math.inf else f"number with 0 <= {name} < {limit:g}"
        raise ValueError(f"{name} must be a {valid}, found {value!r}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, found {value!r}")
    return value


def _pair(value: object) -> tuple[object, object]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"betas must be a pair of numbers, found {value!r}")
    return value[0], value[1]


def _real(value: object) -> float | None:
    if isinstance(value, Tensor):
        # For a learning rate on a device the host waits here, once a group and step.
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    # float() accepts NumPy's scalars. It would also accept strings, which are not numbers.
    if isinstance(value, (str, bytes, bool)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
