"""`"type": "Muon"` of a config: Muon for hidden matrices, and Adam for everything else, in one optimizer.

A config names no parameters, so what is a hidden matrix follows DeepSpeed's rule: it has two dimensions, and neither
"embed" nor "lm_head" in its name. `lr`, or `muon_lr` and `adam_lr`, and `weight_decay` in `params` are of both; all
others are of the one that takes them. Defaults are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gemini.engine.config.read import nearest
from gemini.errors import UnsupportedError
from gemini.placement.optimizers import is_hidden
from optim import HybridAdam

_OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_OF_ADAM = ("betas", "eps")
_OF_BOTH = ("lr", "weight_decay")
_RATES = {"muon_lr": 0, "adam_lr": 1}
ARGUMENTS = (*_OF_BOTH, *_RATES, *_OF_MUON, *_OF_ADAM)
"""The names that `params` may have."""
_DEFAULTS = {"weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}
_DEFAULT_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}


def arguments_of(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of Muon and of Adam. Raises ValueError for a name that neither takes."""
    for name in params:
        if name not in ARGUMENTS:
            meant = nearest(name, list(ARGUMENTS))
            raise ValueError(
                f"params.{name} is not an argument of Muon, nor of the Adam beside it"
                + ("" if meant is None else f"; the nearest is {meant!r}")
                + f" (valid: {', '.join(ARGUMENTS)})"
            )
    # A rate for both replaces the defaults of each.
    params = {**_DEFAULTS, **({} if "lr" in params else _DEFAULT_RATES), **params}
    both = {name: params[name] for name in _OF_BOTH if name in params}
    found = tuple({**both, **{name: params[name] for name in its if name in params}} for its in (_OF_MUON, _OF_ADAM))
    for name, number in _RATES.items():
        if name in params:
            found[number]["lr"] = params[name]
    muon, adam = found
    return muon, adam


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates it. Raises UnsupportedError for a hidden tensor of more dimensions."""
    if not is_hidden(name, parameter.ndim):
        return False
    if parameter.ndim > 2:
        raise UnsupportedError(
            f"{name or 'a parameter'} has {parameter.ndim} dimensions, {tuple(parameter.shape)}, and torch.optim.Muon "
            "takes matrices: make the optimizers yourself, as [torch.optim.Muon(matrices), gemini.HybridAdam(rest)]"
        )
    return True


def muon_beside_adam(
    parameters: Iterable[Any], params: Mapping[str, Any], names: Mapping[Tensor, str]
) -> list[torch.optim.Optimizer]:
    """Muon and Adam of these parameters or param groups, those that have any.

    names: of the parameters in the model. Raises what `arguments_of`, `is_hidden_matrix` and the optimizers raise.
    """
    given = list(parameters)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    muon, adam = arguments_of(params)
    split: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for group in groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        hidden = [is_hidden_matrix(names.get(each, ""), each) for each in members]
        for its, wanted, others in zip(split, (True, False), (_OF_ADAM, _OF_MUON), strict=True):
            chosen = [each for each, is_one in zip(members, hidden, strict=True) if is_one is wanted]
            if chosen:
                own = {name: value for name, value in settings.items() if name not in others}
                its.append({**own, "params": chosen})
    made: list[torch.optim.Optimizer] = []
    if split[0]:
        made.append(torch.optim.Muon(split[0], **muon))
    if split[1]:
        made.append(HybridAdam(split[1], **adam))
    return made
