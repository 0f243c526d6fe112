"""The tables of docs/config.md, made from the code.

    python -m gemini.engine.config.tables docs/config.md

writes them between the page's markers; a test compares.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gemini.engine.config import colossal_keys, deepspeed_keys
from gemini.engine.config.config import Config, section_of
from gemini.engine.config.key import Key, MappedTo, NoEffect, Table
from gemini.engine.config.schedules import SCHEDULES
from gemini.settings import Settings


def with_tables(page: str) -> str:
    """A page with the tables of today between its markers `<!-- table NAME -->` and `<!-- end -->`."""
    tables = {
        "fields": "\n".join(["| field | default | meaning |", "|---|---|---|", *_field_rows(Config)]),
        "schedules": "\n".join(["| schedule | arguments |", "|---|---|", *_schedule_rows()]),
        "deepspeed": _key_table(deepspeed_keys.TABLE),
        "colossal": _key_table(colossal_keys.TABLE),
    }
    for name, table in tables.items():
        marked = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.S)
        # The replacement is a function, because in a replacement text `re` would interpret the backslashes of a table.
        page = marked.sub(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}", page)  # type: ignore[misc]
    return page


def _field_rows(part: type[BaseModel], above: str = "") -> Iterator[str]:
    of_settings = _meanings_of_settings()
    for name, each in part.model_fields.items():
        inner = section_of(each)
        default = "" if inner or each.is_required() else f"`{_written(each.get_default(call_default_factory=True))}`"
        yield f"| `{above}{name}` | {default} | {each.description or of_settings[name]} |"
        if inner:
            yield from _field_rows(inner, f"{above}{name}.")


def _meanings_of_settings() -> dict[str, str]:
    """What the docstring of `Settings` says of each field: its first sentence, and what None means."""
    arguments = (inspect.getdoc(Settings) or "").split("\nArgs:\n")[1].split("\n\n")[0]
    result = {}
    for each in re.split(r"^    (?=\w+:)", arguments, flags=re.MULTILINE)[1:]:
        name, text = each.split(": ", 1)
        first, *others = re.split(r'(?<=\.) (?=["`A-Z0-9])', " ".join(text.split()))
        result[name] = " ".join([first[:1].upper() + first[1:], *(it for it in others if it.startswith("None:"))])
    return result


def _written(value: Any) -> str:
    """A default as YAML has it."""
    names = {None: "null", True: "true", False: "false"}
    if isinstance(value, (bool, type(None))):
        return names[value]
    if isinstance(value, tuple):
        value = list(value)
    # `:g` has six digits, which would round the largest loss scale.
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value) or '""'


def _schedule_rows() -> Iterator[str]:
    for name, schedule in SCHEDULES.items():
        arguments = [
            f"`{field}`" if each.is_required() else f"`{field}={_written(each.default)}`"
            for field, each in schedule.model_fields.items()
        ]
        yield f"| `{name}`: {(schedule.__doc__ or '').strip()} | {', '.join(arguments)} |"


def _key_table(table: Table) -> str:
    rows = ["| key | here |", "|---|---|"]
    # Neighbouring rows with one effect become one row of the page. They are not sorted: the order of a table has a
    # meaning.
    for effect, keys in groupby(table.keys, _in_words):
        rows.append(f"| {', '.join(f'`{path}`' for key in keys for path in _paths(key))} | {effect} |")
    return "\n".join(rows)


def _paths(key: Key) -> Iterator[str]:
    """All spellings, those after the first without their section."""
    yield key.path
    yield from key.spellings


def _in_words(key: Key) -> str:
    effect = key.effect
    if isinstance(effect, NoEffect):
        return f"no effect: {effect.instead}"
    if not isinstance(effect, MappedTo):
        taken = ", ".join(f"`{_written(value)}`" for value in effect.unless) if isinstance(effect.unless, tuple) else ""
        return f"refused{f', but for {taken}' if taken else ' where it is enabled'}: {effect.because}"
    refused = "".join(f"; {value} is refused: {reason}" for value, reason in effect.refused.items())
    return f"`{effect.to}`{f': {effect.note}' if effect.note else ''}{refused}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(with_tables(Path(name).read_text()))
