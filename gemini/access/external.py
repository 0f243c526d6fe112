"""Parameters that a module uses although another module owns them.

They fetch themselves when they are used, so registering is optional. A registered one is fetched with the module:
inside it is a plain `nn.Parameter`, and it stays on the device until the module is done.
"""

from __future__ import annotations

from torch import nn

from gemini.access.link import link_of
from gemini.errors import UnsupportedError

_EXTERNAL = "_gemini_external"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Make `parameter`, which another module owns, part of what `module` fetches before its forward.

    Local, but every rank must register alike, before the model is wrapped. Registering is optional: a parameter that
    is not registered fetches itself when the module uses it. A registered one stays on the device until the module's
    forward, or backward, has ended.

    Args:
        module: the module that uses the parameter.
        parameter: a parameter of any other module of the model.

    Raises UnsupportedError if the model is wrapped already, and TypeError for anything but a module and a parameter.

    Example:
        >>> inner, outer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        >>> register_external_parameter(outer, inner.weight)
        >>> model = ShardedModel(torch.nn.Sequential(inner, outer))
    """
    _check(module, parameter)
    registered = external_parameters(module)
    # By identity: `in` would compare values.
    if not any(parameter is known for known in registered):
        # In a list, a parameter does not become the module's own: `parameters()` and state dicts do not see it.
        setattr(module, _EXTERNAL, [*registered, parameter])


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter(module, parameter)`. Local; every rank must do the same, before wrapping.

    Raises ValueError if `parameter` is not registered with `module`, and what `register_external_parameter` raises.

    Example:
        >>> inner, outer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        >>> register_external_parameter(outer, inner.weight)
        >>> unregister_external_parameter(outer, inner.weight)
    """
    _check(module, parameter)
    registered = external_parameters(module)
    remaining = [known for known in registered if known is not parameter]
    if len(remaining) == len(registered):
        raise ValueError(f"the parameter is not registered with this {type(module).__name__}")
    setattr(module, _EXTERNAL, remaining)


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What was registered with `module`, in that order."""
    registered: list[nn.Parameter] = getattr(module, _EXTERNAL, [])
    return registered


def _check(module: nn.Module, parameter: nn.Parameter) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"a module and a parameter are needed, found {type(module).__name__} and {type(parameter).__name__}"
        )
    if link_of(parameter) is not None:
        raise UnsupportedError(
            "external parameters are registered before ShardedModel(...); without that they fetch themselves"
        )
