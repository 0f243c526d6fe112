"""Modules that choose among their children by data: those that the user marks, and those with a list of experts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from gemini.access.link import link_of
from gemini.errors import UnsupportedError

Modules = type[nn.Module] | str | Iterable[type[nn.Module] | str]

# Names such as `experts`, `local_experts` and `routed_expert`.
_EXPERTS = re.compile(r"(.*_)?experts?")
_MARK = "_gemini_leaf"


def set_leaf_module(model: nn.Module, classes: Modules) -> list[nn.Module]:
    """Mark modules that choose among their children by data, such as a mixture of experts.

    A marked module is fetched as one operator, with all of its children, so that ranks that choose different children
    still fetch the same chunks. A module with a `ModuleList` called `experts` is treated so without a mark. Local, but
    every rank must mark alike, before the model is wrapped.

    Args:
        model: the module that will be wrapped.
        classes: one or several of: a module class, which includes its subclasses; the name of a class (`"Block"`), with
            or without its Python module (`"models.gpt.Block"`); the name of a module in the model (`"layers.3.mlp"`).

    Returns the marked modules in the model's order. Raises ValueError for a class or name that the model does not
    have, TypeError for anything but classes and strings, and UnsupportedError if the model is wrapped already; then
    nothing is marked.

    Example:
        >>> set_leaf_module(torch.nn.Sequential(torch.nn.Bilinear(8, 8, 8)), "Bilinear")
        [Bilinear(in1_features=8, in2_features=8, out_features=8, bias=True)]
    """
    return _mark(model, classes, "set_leaf_module()", True)


def unset_leaf_module(model: nn.Module, classes: Modules) -> list[nn.Module]:
    """Undo `set_leaf_module(model, classes)`, or state that modules with a list of experts always use all of them.

    The operators of such a module are then fetched one by one. Local, as `set_leaf_module`, with the same `model` and
    `classes`. Returns the modules in the model's order. Raises what `set_leaf_module` raises.

    Example:
        >>> blocks = torch.nn.Sequential(torch.nn.Bilinear(8, 8, 8))
        >>> marked = set_leaf_module(blocks, "Bilinear")
        >>> unset_leaf_module(blocks, "Bilinear") == marked
        True
    """
    return _mark(model, classes, "unset_leaf_module()", False)


def is_marked(module: nn.Module) -> bool:
    """Whether the user has marked or unmarked the module."""
    return hasattr(module, _MARK)


def chooses(module: nn.Module) -> bool:
    """Whether the module chooses among its children by data: by its mark, else if it has a list of experts."""
    if is_marked(module):
        return bool(getattr(module, _MARK))
    # A list of one expert leaves no choice.
    lists = (name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) > 1)
    return any(_EXPERTS.fullmatch(name) for name in lists)


def _mark(model: nn.Module, classes: Modules, function: str, mark: bool) -> list[nn.Module]:
    wanted = (classes,) if isinstance(classes, (type, str)) else tuple(classes)
    if not wanted or not all(isinstance(each, str) or _is_module_class(each) for each in wanted):
        raise TypeError(f"classes must be a module class, a name, or several of them, found {classes!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, found {type(model).__name__}")
    # Find all modules before the first is marked, so that an error marks none.
    answers = {each: [m for name, m in model.named_modules() if _is(each, name, m)] for each in wanted}
    absent = [each if isinstance(each, str) else each.__name__ for each, modules in answers.items() if not modules]
    if absent:
        present = ", ".join(dict.fromkeys(type(module).__name__ for module in model.modules()))
        raise ValueError(
            f"no module of class or name {', '.join(absent)} in {type(model).__name__}, which has {present}"
        )
    chosen = {module for modules in answers.values() for module in modules}  # membership only
    # In the order of the model, which is the same on all ranks, whatever the order of `classes`.
    found = [module for module in model.modules() if module in chosen]
    if any(link_of(parameter) is not None for module in found for parameter in module.parameters()):
        raise UnsupportedError(f"{function} after ShardedModel(...): call it on the module before it is wrapped")
    for module in found:
        setattr(module, _MARK, mark)
    return found


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _is(wanted: type[nn.Module] | str, name: str, module: nn.Module) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (name, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
