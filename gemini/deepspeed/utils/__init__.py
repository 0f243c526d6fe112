"""`deepspeed.utils`: whole and local states of parameters, leaf modules, and the log, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from torch import nn

from gemini.access.full_access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from gemini.deepspeed.utils.logging import log_dist, logger
from gemini.elsewhere import missing
from gemini.model.operators import chooses, set_leaf_module, unset_leaf_module
from gemini.model.operators import set_leaf_module as set_z3_leaf_modules
from gemini.model.operators import unset_leaf_module as unset_z3_leaf_modules

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module, or no longer. Local, as `gemini.set_leaf_module`, whose errors it raises."""
    # A module's name in itself is "".
    (set_leaf_module if flag else unset_leaf_module)(model, "")


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules that have these names in `model.named_modules()`, or no longer. Local.

    Returns the modules, and the names that the model does not have. Raises ValueError for such names unless
    `raise_if_not_found` is False, and what `gemini.set_leaf_module` raises.
    """
    return _mark_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As `set_z3_leaf_modules_by_name`, for all modules whose names end in one of these suffixes. Local."""
    return _mark_named(model, suffixes, str.endswith, flag, raise_if_not_found)


def _mark_named(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of which a name fits one that is wanted. Returns them, and what fits no module."""
    fitting = {each: [name for name, _ in model.named_modules() if fits(name, each)] for each in wanted}
    absent = [each for each, names in fitting.items() if not names]
    names = [name for each in fitting.values() for name in each]
    if absent and raise_if_not_found:
        raise ValueError(f"no module of {type(model).__name__} is called {', '.join(absent)}")
    return ((set_leaf_module if flag else unset_leaf_module)(model, names) if names else []), absent


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are fetched with all of their children: marked ones, and those with a list of experts. Local."""
    return [module for module in model.modules() if chooses(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is fetched with all of its children. Local."""
    return chooses(model)


class RepeatingLoader:
    """Goes through a loader again and again, without an end. Local.

    loader: anything that can be iterated more than once; its attributes are those of this object.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Raises StopIteration if the loader is empty."""
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def __getattr__(name: str) -> Any:
    """The module `zero_to_fp32`, imported when it is asked for. Raises AttributeError: what to use instead."""
    if name == "zero_to_fp32":
        return import_module(f"{__name__}.{name}")
    raise missing(__name__, name)
