"""`.data` and `set_` of parameters that are plain: a write through them is a write to the payload.

A parameter that fetches itself notices its users by `__torch_function__`. A plain one is torch's own class, for which
nothing is called: a class of ours in its place would cost every small operator an eighth of its forward. `.data` is an
attribute of that class, and a write through it raises no version counter. So while a call of a model runs,
`nn.Parameter` has another `data`, which answers as torch's does for all parameters but those of a wrapped model.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from gemini.access.link import Link, link_of
from gemini.access.released import get_data, set_data, set_source

_DATA: Any = torch.Tensor.data
_open: set[Watch] = set()
_lock = Lock()


class Watch:
    """A context in which writes through `.data` of plain parameters are noticed. Leaving it twice does no harm."""

    def __enter__(self) -> None:
        with _lock:
            _open.add(self)
            for name, own in _OWN.items():
                setattr(nn.Parameter, name, own)

    def __exit__(self, *error: object) -> None:
        with _lock:
            _open.discard(self)
            if not _open:
                for name in _OWN:
                    if name in nn.Parameter.__dict__:
                        delattr(nn.Parameter, name)


def _plain_link(parameter: Tensor) -> Link | None:
    return link_of(parameter) if type(parameter) is nn.Parameter else None


def _get(parameter: Tensor) -> Tensor:
    link = _plain_link(parameter)
    if link is None:
        found: Tensor = _DATA.__get__(parameter)
        return found
    chunk = link.managed.chunk
    # Another module's, which may leave while the user still has the answer: that one fetches itself, as outside.
    if chunk.may_leave and not chunk.pins:
        return get_data(parameter)
    return link.data()


def _set(parameter: Tensor, value: Tensor) -> None:
    if _plain_link(parameter) is None:
        _DATA.__set__(parameter, value)
    else:
        set_data(parameter, value)


def _set_source(parameter: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if _plain_link(parameter) is None:
        return torch.Tensor.set_(parameter, *args, **kwargs)
    return set_source(parameter, *args, **kwargs)


_OWN: dict[str, Any] = {"data": property(_get, _set), "set_": _set_source}
"""What `nn.Parameter` has while a call runs."""
