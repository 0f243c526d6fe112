"""`"type": "Muon"` of a config: Muon for hidden matrices, and Adam for everything else, in one optimizer.

A config names no parameters, so what is a hidden matrix follows DeepSpeed's rule: it has two dimensions, and neither
"embed" nor "lm_head" in its name; `adam_names` in `params` has other words in place of these. `lr`, or `muon_lr` and
`adam_lr`, and `weight_decay` in `params` are of both; all others are of the one that takes them. Defaults are
DeepSpeed's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemini.engine.config.read import nearest
from gemini.errors import UnsupportedError
from gemini.log import get_dist_logger
from gemini.optimizer.muon import Muon
from gemini.placement.optimizers import NOT_HIDDEN, is_hidden
from optim import HybridAdam

_OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_OF_ADAM = ("betas", "eps")
_OF_BOTH = ("lr", "weight_decay")
_RATES = {"muon_lr": 0, "adam_lr": 1}
_WORDS = "adam_names"
ARGUMENTS = (*_OF_BOTH, *_RATES, *_OF_MUON, *_OF_ADAM, _WORDS)
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


def _words_of(params: Mapping[str, Any]) -> list[str]:
    """What the names of Adam's matrices have in them. Raises ValueError if it is no list of texts."""
    words = params.get(_WORDS, NOT_HIDDEN)
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"params.{_WORDS} must be a list of parts of names, as {list(NOT_HIDDEN)}, found {words!r}")
    return list(words)


def is_hidden_matrix(name: str, parameter: Tensor, words: Sequence[str] = NOT_HIDDEN) -> bool:
    """Whether Muon updates it, matrix by matrix if it is a stack of them, such as experts.

    Raises UnsupportedError for a hidden tensor of more dimensions.

    words: that the names of matrices have which it does not update.
    """
    if not is_hidden(name, parameter.ndim, words):
        return False
    if parameter.ndim > 3:
        raise UnsupportedError(
            f"{name or 'a parameter'} has {parameter.ndim} dimensions, {tuple(parameter.shape)}, and Muon takes "
            f"matrices and stacks of them: for Adam write a part of its name into {_WORDS!r} of params, or make the "
            "optimizers yourself, as [gemini.Muon(matrices), gemini.HybridAdam(rest)]"
        )
    return True


def muon_beside_adam(
    parameters: Iterable[Any],
    params: Mapping[str, Any],
    names: Mapping[Tensor, str],
    among: Collection[Tensor] | None = None,
) -> list[torch.optim.Optimizer]:
    """Muon and Adam of these parameters or param groups, those that have any.

    names: of the parameters in the model. among: those that Muon may update; None: all. Raises what `arguments_of`,
    `is_hidden_matrix` and the optimizers raise.
    """
    given = list(parameters)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    muon, adam = arguments_of(params)
    words = _words_of(params)
    split: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for group in groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        hidden = [
            (among is None or each in among) and is_hidden_matrix(names.get(each, ""), each, words) for each in members
        ]
        for its, wanted, others in zip(split, (True, False), (_OF_ADAM, _OF_MUON), strict=True):
            chosen = [each for each, is_one in zip(members, hidden, strict=True) if is_one is wanted]
            if chosen:
                own = {name: value for name, value in settings.items() if name not in others}
                its.append({**own, "params": chosen})
    made: list[torch.optim.Optimizer] = []
    if split[0]:
        made.append(Muon(split[0], **muon))
    if split[1]:
        made.append(HybridAdam(split[1], **adam))
    return made


def check_modules(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Warn of embeddings' weights that Muon updates because their names do not say what they are. Local.

    DeepSpeed's rule sends GPT-2's "wte" and "wpe" there, so a config that was written for it means the same here.
    Raises UnsupportedError for the weight of a convolution, whose three dimensions are no stack of matrices.
    """
    muons = (each for each in optimizers if isinstance(each, Muon))
    its = {id(p) for each in muons for group in each.param_groups for p in group["params"]}

    def names_of(*kinds: type[nn.Module]) -> list[str]:
        """Of the parameters that Muon updates and that are weights of such modules."""
        weights = {id(each.weight) for each in model.modules() if isinstance(each, kinds)}
        return [name for name, parameter in model.named_parameters() if id(parameter) in its & weights]

    convolutions = names_of(nn.Conv1d, nn.ConvTranspose1d)
    if convolutions:
        raise UnsupportedError(
            f"{', '.join(convolutions)}: the weight of a convolution has three dimensions and is no stack of matrices "
            f"for Muon: for Adam write a part of its name into {_WORDS!r} of params, or make the optimizers yourself, "
            "as [gemini.Muon(matrices), gemini.HybridAdam(rest)]"
        )
    found = names_of(nn.Embedding, nn.EmbeddingBag)
    if found:
        words = [*NOT_HIDDEN, *dict.fromkeys(name.split(".")[-2] for name in found if "." in name)]
        get_dist_logger().warning(
            f"Muon updates {', '.join(found)}, which embed tokens or positions, since no name has one of "
            f'{", ".join(NOT_HIDDEN)} in it, as in DeepSpeed: for Adam say "optimizer": {{"params": '
            f'{{"{_WORDS}": {json.dumps(words)}}}}}',
            ranks=[0],
        )
