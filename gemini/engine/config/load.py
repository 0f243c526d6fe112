"""`load_config`: from a dict or a file, in any of three dialects, to a checked `Config`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from gemini.engine.config import colossal_keys, deepspeed_keys
from gemini.engine.config.config import Config, section_of
from gemini.engine.config.key import Table, Translation
from gemini.engine.config.read import KeyPath, Problem, is_slip, problems_of, read, said_of
from gemini.errors import ConfigError
from gemini.settings import BUDGETS

Source = Config | Mapping[str, Any] | str | os.PathLike[str] | None
Dialect = Literal["gemini", "deepspeed", "colossal"]
_OURS = "gemini"  # a section of our own keys in the config of another library
_BESIDE = (*BUDGETS, "disk_path", "disk_memory", "disk_optim_frac")  # of ours, that may stand beside its keys
TABLES: dict[Dialect, Table] = {"deepspeed": deepspeed_keys.TABLE, "colossal": colossal_keys.TABLE}


def load_config(
    config: Source = None,
    *,
    dialect: Dialect | None = None,
    prefers: Dialect = "gemini",
    auto: Mapping[str, Any] | None = None,
    world_size: int | None = None,
) -> Config:
    """A config from a mapping or a file (JSON, YAML, TOML, Python). Local: ranks are not compared.

    The config of another library may have budgets of ours (`device_memory`) beside its keys, and any of our keys in a
    section "gemini".

    A Python file is run, with all rights of the user's; GEMINI_NO_EXEC=1 refuses it.

    Args:
        config: the mapping, the path, or a Config, which stays as it is. None: all defaults.
        dialect: the library whose keys these are, "gemini", "deepspeed" or "colossal". None: the one that knows most.
        prefers: without `dialect`, the library whose keys these are if it knows all of them.
        auto: values for keys of DeepSpeed that say "auto", by dotted path: {"optimizer.params.lr": 1e-4}.
        world_size: ranks that share a batch. None: batch sizes are compared when the number is known.

    Raises ConfigError, with a line for every key that is wrong.

        >>> load_config({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}).settings().stage
        2
    """
    if isinstance(config, Config):
        return config
    source = read({} if config is None else config)
    # YAML reads the key `on` as True, for example.
    other = [name for name in source.data if not isinstance(name, str)]
    if other:
        raise source.error([Problem((), f"the key {other[0]!r} is not a string: put it in quotes")])
    if dialect not in (None, "gemini", *TABLES):
        raise ConfigError(f"dialect must be 'gemini', {', '.join(map(repr, TABLES))} or None, found {dialect!r}")
    table = TABLES.get(dialect or dialect_of(source.data, prefers))
    if table is None:
        # null stands for the default, as it does in the other dialects.
        given = {name: value for name, value in source.data.items() if value is not None}
        # In gemini's own dialect every key is its field, so a problem of a field is one of the key of that name.
        translated = Translation(given, {path: path for path in _paths(given)})
    else:
        theirs, ours = _divided(source.data, table)
        translated = table.translate(theirs, auto or {})
        for path, (name, value) in ours.items():
            if translated.fields.get(name, value) != value:
                origin = ".".join(translated.origins.get((name,), (table.section,)))
                translated.problems.append(Problem(path, f"={value!r} contradicts {origin}: leave one of them out"))
            translated.put((name,), value, path)
    if translated.problems:
        raise source.error(translated.problems)
    try:
        result = Config.model_validate(translated.fields)
    except ValidationError as error:
        # A typo is answered with a key of the dialect in which the user writes.
        found = problems_of(error, _field_names(Config) if table is None else table.by_path)
        # The sentences have all that pydantic found, in the keys of the user's file. Its traceback adds none.
        raise source.error([_at_its_key(each, translated.origins) for each in found]) from None
    # `Config` has compared the batch sizes as far as it can without the number of ranks.
    if world_size is not None:
        try:
            result.batch_sizes(world_size)
        except ValueError as error:
            raise source.error([said_of(("train_batch_size",), str(error))]) from None
        try:
            result.settings().over(world_size)
        except ValueError as error:
            name = str(error).partition("=")[0]  # the error begins with the setting that does not fit
            said = said_of((name,), str(error))
            raise source.error([_at_its_key(said, translated.origins)]) from None
    return result.with_notes(translated.ignored, source.constants)


def _divided(data: Mapping[str, Any], table: Table) -> tuple[dict[str, Any], dict[KeyPath, tuple[str, Any]]]:
    """The keys of another library, and ours beside them, which it has no words for: by path, the field and its value.

    Ours are budgets and the disk at the top level, and everything in a section "gemini".
    """
    section = data.get(_OURS)
    inside: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    beside = [name for name in _BESIDE if name in data and table.key_of((name,)) is None]
    # A section that is no mapping is left to the table, which says that it knows no such key.
    own = [*beside, *([_OURS] if isinstance(section, Mapping) else [])]
    theirs = {name: value for name, value in data.items() if name not in own}
    ours: dict[KeyPath, tuple[str, Any]] = {(name,): (name, data[name]) for name in beside}
    ours |= {(_OURS, str(name)): (str(name), value) for name, value in inside.items()}
    return theirs, {path: its for path, its in ours.items() if its[1] is not None}


def dialect_of(data: Mapping[str, Any], prefers: Dialect = "gemini") -> Dialect:
    """Whose keys these are: of `prefers` if it knows all, else of the library that knows most, ours among equals."""
    # One key decides where no other library has it: `zero_optimization` is DeepSpeed's, `zero` Colossal-AI's.
    # So does one that is nearly it: a config that has `zero_optimisation` is asked for the z.
    for dialect, table in TABLES.items():
        if any(is_slip(name, table.section) for name in data if name not in Config.model_fields):
            return dialect
    # A section counts by the keys in it: names such as "optimizer" and "params" are those of several libraries.
    keys = [path for path in _leaves(data) if path[0] not in (_OURS, *_BESIDE)]
    if prefers in TABLES and all(TABLES[prefers].key_of(path) is not None for path in keys):
        return prefers
    known: dict[Dialect, int] = {"gemini": sum(path[0] in Config.model_fields for path in keys)}
    known |= {dialect: sum(table.key_of(path) is not None for path in keys) for dialect, table in TABLES.items()}
    # Of equals `max` returns the first one in the dict, and "gemini" stands first.
    return max(known, key=lambda dialect: known[dialect])


def _field_names(part: type[BaseModel], above: str = "") -> Iterator[str]:
    """All fields as dotted paths."""
    for name, each in part.model_fields.items():
        yield f"{above}{name}"
        inner = section_of(each)
        if inner is not None:
            yield from _field_names(inner, f"{above}{name}.")


def _paths(data: Mapping[Any, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    """All keys of a nested mapping."""
    for name, value in data.items():
        yield (*above, str(name))
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, str(name)))


def _leaves(data: Mapping[Any, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    """The keys of a nested mapping that are no sections."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, str(name)))
        else:
            yield (*above, str(name))


def _at_its_key(problem: Problem, origins: Mapping[KeyPath, KeyPath]) -> Problem:
    """What is wrong with a field, said of the key that the user wrote.

    A sentence about a section that begins with a field in it is about that field's key.
    """
    path, sentence = problem.path, problem.words.removeprefix(": ")
    # Validators of several fields raise one sentence for their section, such as "min_scale must be ...". The name at
    # its beginning is the field, whose key the user knows.
    named = re.match(r"[\w.]+(?=[ =])", sentence)
    inner = named[0].split(".") if named else []
    if len(inner) > 1 or (inner and (*path, *inner) in origins):
        path = (*path, *inner)
        problem = said_of(path, sentence[sentence.index(inner[-1]) :])
    # The innermost origin counts: the parts of `loss_scale` come from several keys of `fp16`.
    for end in range(len(path), 0, -1):
        if path[:end] in origins:
            key = (*origins[path[:end]], *path[end:])
            # The sentence shows the field's value, which need not be the one that the user wrote: `initial_scale=4.0`
            # follows from `initial_scale_power: 2`. It stands behind its own name, as it is no value of the user's key.
            is_our_value = problem.words[0] == "=" and key[-1] != path[-1]
            return Problem(key, f": {path[-1]}{problem.words}" if is_our_value else problem.words)
    return problem
