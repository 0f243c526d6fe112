"""In which line of a file a key stands, for error messages."""

from __future__ import annotations

import ast
import re

import yaml

from gemini.engine.config.json_text import strict_json
from gemini.engine.config.problem import KeyPath


def lines_of(text: str, suffix: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key of a text that was read as a config. Empty for other texts."""
    try:
        return _FINDERS[suffix](text) if suffix else {}
    except (yaml.YAMLError, RecursionError):  # a place is a help; the error itself is told in any case
        return {}


def line_of(path: KeyPath, lines: dict[KeyPath, int]) -> int | None:
    """The line of the innermost key of `path` that has one."""
    known = [lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines]
    return known[0] if known else None


def _of_json(text: str) -> dict[KeyPath, int]:
    return _of_yaml(strict_json(text).replace("\t", " "))  # YAML contains JSON, but for tabs between its tokens


def _of_yaml(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}

    def walk(node: yaml.Node | None, path: KeyPath) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            inner = (*path, str(key.value))
            lines[inner] = key.start_mark.line + 1
            walk(value, inner)

    # `compose` stops before values are made: nodes know their lines, and values do not.
    walk(yaml.compose(text, yaml.SafeLoader), ())
    return lines


def _of_toml(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        header, entry = re.match(r"\s*\[+([^\]]+)\]", line), re.match(r"""\s*([\w."' -]+?)\s*=""", line)
        if header:
            table = _parts(header[1])
            lines.setdefault(table, number)
        elif entry:
            lines.setdefault((*table, *_parts(entry[1])), number)
    return lines


def _parts(name: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in name.split("."))


def _of_python(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}

    def walk(node: ast.expr, path: KeyPath) -> None:
        inside: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Call):
            inside = [(each.arg, each.value) for each in node.keywords if each.arg]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            inside = [(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]
        for name, value in inside:
            lines[(*path, name)] = value.lineno
            walk(value, (*path, name))

    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                lines[(ast.unparse(target),)] = statement.lineno
                walk(statement.value, (ast.unparse(target),))
    return lines


_FINDERS = {".json": _of_json, ".yaml": _of_yaml, ".yml": _of_yaml, ".toml": _of_toml, ".py": _of_python}
