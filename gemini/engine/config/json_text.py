"""JSON as people write it for DeepSpeed, whose reader takes more than JSON: comments, last commas, Python's True.

Everything else is an error that names the line and what to do there.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

# Every pattern below also matches strings, so that the inside of a string is never taken for anything else.
_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENTS_AND_NAMES = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/|\b(?:True|False|None)\b", re.S)
_TOKENS = re.compile(rf"(?P<key>{_STRING})\s*:|{_STRING}|[{{}}\[\]]")
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_NAMES = {"True": "true", "False": "false", "None": "null"}


class TextError(ValueError):
    """What is wrong with a text, and in which line (from 1)."""

    def __init__(self, words: str, line: int | None = None) -> None:
        super().__init__(words)
        self.line = line


def parse_json(text: str) -> Any:
    """The value that a JSON text says. Raises TextError."""
    strict = strict_json(text)
    try:
        found = json.loads(strict, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise TextError(*_in_words(strict, error)) from error
    # This comes after `json.loads`: the search for tokens takes it for granted that brackets and strings are closed.
    _refuse_repeats(strict)
    return found


def strict_json(text: str) -> str:
    """The text without what JSON does not have; every character that stays keeps its place."""
    # Comments go first: one may stand between the last comma and its bracket.
    return _LAST_COMMA.sub(_blank, _COMMENTS_AND_NAMES.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    # Blanks keep every line where the user wrote it, so that errors name that line.
    found = match[0]
    return found if found[0] == '"' else _NAMES.get(found) or re.sub(r"[^\n]", " ", found)


def _refuse_repeats(text: str) -> None:
    """Refuse equal keys in valid JSON: json.loads would take the last of them, and its hooks know no lines."""
    objects: list[dict[str, int]] = []  # the line of every key, of the objects and lists that are open
    for token in _TOKENS.finditer(text):
        if token[0] in "{[":
            # Lists are counted, too, so that each closing bracket ends the right one. They have no keys.
            objects.append({})
        elif token[0] in "}]":
            objects.pop()
        elif token["key"] is not None:
            # Keys are compared as JSON reads them: "l\u0072" is "lr".
            name, line = json.loads(token["key"]), text.count("\n", 0, token.start()) + 1
            if name in objects[-1]:
                first = objects[-1][name]
                raise TextError(f"the key {name!r} stands there twice, first in line {first}: leave one out", line)
            objects[-1][name] = line


def _refuse_constant(name: str) -> NoReturn:
    raise TextError(f"{name} is not a number that a config can hold")


def _in_words(text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    rest = text[error.pos :]
    # The parser notices a missing comma at the next token, which often stands a line below the place to mend.
    before = text[: error.pos].rstrip()
    line = before.count("\n") + 1
    if rest.startswith("..."):
        return "'...' stands for the rest of an example: put your own keys there, or remove it", error.lineno
    if error.msg.startswith("Expecting ',' delimiter") and rest:
        last = before.rsplit("\n", 1)[-1].strip()
        return f"a comma is missing at the end of this line, after {last!r}", line
    if not rest.strip():
        return "the text ends before the last bracket is closed", line
    if rest[0] == "'":
        return "JSON has strings in double quotes only", error.lineno
    return f"{error.msg}, found {rest.split(maxsplit=1)[0][:40]!r}", error.lineno
