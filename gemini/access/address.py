"""The result of `data_ptr()` on a released parameter, whose memory moves."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from gemini.errors import ReleasedParameterError


class MovingAddress:
    """Equal to the addresses of the same parameter, under any of its names, and to no other.

    Libraries compare `data_ptr()`s to find tied weights. It is no number: memory that moves may hold something else by
    the time that a number is used as an address.
    """

    __slots__ = ("_name", "_parameter")

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self._parameter = parameter
        self._name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MovingAddress) and other._parameter is self._parameter

    def __hash__(self) -> int:
        return hash(self._parameter)

    def __repr__(self) -> str:
        return f"<address of parameter {self._name!r} of a ShardedModel, which moves>"

    def _no_number(self, *args: Any) -> NoReturn:
        raise ReleasedParameterError(
            f"data_ptr of parameter {self._name!r} is no number: its memory moves. It can be compared with other "
            "data_ptrs. Read the parameter (clone(), item(), numpy()) instead, or use model.state_dict(). "
            "copy.deepcopy(model) of the ShardedModel is a plain module"
        )

    # Every use as a number raises: a kernel that is given the address would read other memory.
    __index__ = __int__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _no_number
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __and__ = _no_number
