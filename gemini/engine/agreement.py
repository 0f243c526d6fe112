"""Agreement on the config: equal on all ranks, or an error on all of them, before anything is allocated."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from gemini.engine.config import Config, load_config
from gemini.engine.config.load import Dialect
from gemini.errors import ConfigError, DivergenceError
from sharding import Collectives

Source = Config | Mapping[str, Any] | str | os.PathLike[str] | None
_GOOD, _BAD = b"\0", b"\1"


def agreed_config(
    source: Source,
    group: dist.ProcessGroup | None,
    *,
    dialect: Dialect | None = None,
    prefers: Dialect = "gemini",
    auto: Mapping[str, Any] | None = None,
) -> Config:
    """The config that `load_config` makes of these arguments, if all ranks of the group have the same one. Collective.

    Raises ConfigError on every rank if one of them cannot read its config, and DivergenceError if they differ.
    """
    return agreed(lambda size: load_config(source, dialect=dialect, prefers=prefers, auto=auto, world_size=size), group)


def agreed(make: Callable[[int], Config], group: dist.ProcessGroup | None) -> Config:
    """The config that `make` makes from the number of ranks, if all ranks have the same one. Collective.

    Raises the errors of `agreed_config`, and what `make` raises; the other ranks then raise ConfigError.
    """
    # A model's communicator comes later: its settings, such as `rank_timeout`, are in the config that is read here.
    collectives = Collectives(group)
    config, error = None, None
    try:
        # `canonical` is inside because it takes the `repr` of objects of the user's, which may raise.
        config = make(collectives.world_size)
        words = _GOOD + config.canonical().encode()
    except Exception as found:
        # Any exception must reach the other ranks, which would wait for this one otherwise.
        error = found
        said = str(found) if isinstance(found, ConfigError) else f"{type(found).__name__}: {found}"
        # A file's name in a message may have lone surrogates, which UTF-8 cannot encode.
        words = _BAD + said.encode(errors="backslashreplace")
    # Every rank comes here, with its config or with the reason why it has none.
    everyone = collectives.all_gather_bytes(words)
    if error is not None:
        raise error
    # Ranks go through the same list in the same order, so all that have a config of their own raise the same error.
    for rank, its in enumerate(everyone):
        if its.startswith(_BAD):
            raise ConfigError(f"rank {rank}: {its[1:].decode()}")
        if its != everyone[0]:
            raise DivergenceError(
                f"the config differs between rank 0 and rank {rank}: {_difference(everyone[0], its)}. Give all one"
            )
    assert config is not None
    return config


def _difference(one: bytes, other: bytes) -> str:
    """The first field that differs, with both values."""
    one_config, other_config = (json.loads(words[1:]) for words in (one, other))
    name = next(name for name in one_config if one_config[name] != other_config.get(name))
    # The model's settings are one list of `name=value`; of those only the two that differ are shown.
    if not isinstance(one_config[name], list):
        return f"{name} is {one_config[name]!r} against {other_config.get(name)!r}"
    pair = next((a, b) for a, b in zip(one_config[name], other_config[name], strict=True) if a != b)
    return " against ".join(pair)
