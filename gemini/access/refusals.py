"""Error messages for operations that sharded parameters do not support."""

from __future__ import annotations

import functools

import torch

from gemini.errors import ReleasedParameterError, UnsupportedError


def cannot_take(wrapper: str, name: str) -> UnsupportedError:
    """The error for `wrapper`, which would take over a parameter that is sharded already."""
    return UnsupportedError(
        f"{wrapper} cannot take over parameter {name!r}, which a ShardedModel shards and whose gradient it reduces "
        "between ranks itself: use the ShardedModel as it is, with its own no_sync(), and wrap only modules beside it"
    )


def refuse_traced(parameter: str) -> None:
    """Raises ReleasedParameterError if the compiler is tracing a function that uses the parameter of this name."""
    if torch._guards.CompileContext.try_get() is not None:
        raise _class_of_refusals()(
            f"a compiled function uses parameter {parameter!r}, which is not fetched for it: compile the module that "
            "owns the parameter instead of a function that uses it, call that module through the ShardedModel, and "
            "before wrapping declare what it borrows with gemini.register_external_parameter(module, parameter)"
        )


@functools.cache
def _class_of_refusals() -> type[ReleasedParameterError]:
    """A `ReleasedParameterError` that reaches the user: the compiler wraps errors of any class but a few of its own.

    For most of those it would break the graph and go on to compile our functions, but not for `ShortenTraceback`.
    """
    from torch._dynamo.exc import ShortenTraceback  # slow to import, but a compiler that traces has done so

    class RefusedWhileTraced(ReleasedParameterError, ShortenTraceback):
        def __init__(self, message: str) -> None:
            ShortenTraceback.__init__(self, message, first_useful_frame=None)

    return RefusedWhileTraced
