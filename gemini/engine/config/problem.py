"""What is wrong with a config, in words: one sentence for each key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gemini.engine.config.nearest import nearest

KeyPath = tuple[str, ...]

_MAX_NAMES = 30

# The keys are types of pydantic's errors. Names in braces stand for entries of an error's context.
_MUST_BE = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}


@dataclass(frozen=True)
class Problem:
    """What is wrong with a key.

    Args:
        path: the key. Empty: the config as a whole.
        words: what follows the key in the sentence: "must be ...", "=5 is ...", or ": " and a sentence of its own.
    """

    path: KeyPath
    words: str

    def __str__(self) -> str:
        key = ".".join(self.path)
        return f"{key}{'' if not key or self.words[0] in ':=' else ' '}{self.words}"


def said_of(path: KeyPath, sentence: str) -> Problem:
    """A sentence about a key or its section; where it begins with a key's name, what it says of that."""
    begins = re.match(rf"{re.escape(path[-1])}(?=[ =])\s*", sentence) if path else None
    return Problem(path, sentence[begins.end() :] if begins else f": {sentence}" if path else sentence)


def unknown_key(path: KeyPath, valid: Iterable[str]) -> Problem:
    """The problem of an unknown key. valid: all keys, as dotted paths; those beside the unknown one are tried first."""
    # A row for all names below a section is no name that could be proposed.
    valid, parent = [key for key in valid if not key.endswith("*")], ".".join(path[:-1])
    beside = [key for key in valid if key.rpartition(".")[0] == parent]
    # A key in its own section is meant more often than one of the same words elsewhere.
    found = nearest(path[-1], beside) or nearest(path[-1], valid)
    if found is not None:
        return Problem(path, f"is not a key; the nearest valid one is {found!r}")
    names = sorted({key.rpartition(".")[2] for key in beside or valid})
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return Problem(path, f"is not a key; valid ones are {', '.join(names[:_MAX_NAMES])}{more}")


def problems_of(error: ValidationError, valid: Iterable[str], prefix: KeyPath = ()) -> list[Problem]:
    """What pydantic found, with the nearest of the `valid` keys for those that are unknown."""
    return [_problem(each, prefix, list(valid)) for each in error.errors(include_url=False)]


def _problem(error: ErrorDetails, prefix: KeyPath, valid: list[str]) -> Problem:
    path = (*prefix, *(str(part) for part in error["loc"]))
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(path, valid)
    if kind == "missing":
        return Problem(path, "is missing")
    # The config's own validators raise ValueError, with a sentence for the user.
    if kind == "value_error":
        return said_of(path, str(context["error"]))
    found = f"found {shown(error['input'])}"
    if kind in _MUST_BE:
        return Problem(path, f"must be {_MUST_BE[kind].format_map(context)}, {found}")
    # Errors of kinds that `_MUST_BE` does not have are told in pydantic's words, with key and value.
    return Problem(path, f": {error['msg']}, {found}")


def shown(value: Any) -> str:
    """A value of a config in a sentence, not longer than a line."""
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
