"""Parameters that the user keeps out of the chunks: `ignored_parameters` of `Settings`.

They stay as in a plain module: whole, on their device, with their own memory, dtype and `.grad`. They are not compared
or reduced over ranks, and our optimizers do not step them.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from torch import nn

from gemini.building.link import built_link_of
from gemini.errors import UnsupportedError
from gemini.settings import Settings


def ignored_in(module: nn.Module, settings: Settings) -> frozenset[nn.Parameter]:
    """The parameters of `module` that `settings` ignore. A tied parameter is ignored if one of its names is. Local.

    Raises TypeError if `module` is no module, ValueError for a pattern that matches no parameter, and UnsupportedError
    for a parameter that was built on shards.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, found {type(module).__name__}")
    found: dict[nn.Parameter, str] = {}
    # Each pattern must match something: a misspelled one would silently put the parameter into a chunk.
    unused = dict.fromkeys(settings.ignored_parameters)
    for name, parameter in module.named_parameters(remove_duplicate=False) if unused else ():
        for pattern in settings.ignored_parameters:
            if fnmatchcase(name, pattern):
                unused.pop(pattern, None)
                found[parameter] = name
    if unused:
        raise ValueError(f"ignored_parameters: no parameter has the name {', '.join(map(repr, unused))}")
    for parameter, name in found.items():
        if built_link_of(parameter) is not None:
            raise UnsupportedError(
                f"ignored_parameters names {name!r}, which was built on shards: make its module outside of the "
                "ZeroInitContext"
            )
    return frozenset(found)


def zero_ignored(ignored: Collection[nn.Parameter], set_to_none: bool) -> None:
    """Discard the gradients of ignored parameters, as `nn.Module.zero_grad` does. Local."""
    for parameter in ignored:
        if set_to_none or parameter.grad is None:
            parameter.grad = None
        else:
            # After a backward with create_graph=True the gradient has a graph, which `zero_` would extend.
            parameter.grad.detach_()
            parameter.grad.zero_()
