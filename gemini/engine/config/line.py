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
    # A line is a help only. The error itself is told in any case, and must not give way to one of this search.
    except (yaml.YAMLError, RecursionError):
        return {}


def line_of(path: KeyPath, lines: dict[KeyPath, int]) -> int | None:
    """The line of the innermost key of `path` that has one."""
    # A key that is missing has no line, so the line is that of the section in which it is missing.
    known = [lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines]
    return known[0] if known else None


def _of_json(text: str) -> dict[KeyPath, int]:
    # YAML contains JSON, except that it has no tabs between tokens. `strict_json` keeps every line where it was.
    return _of_yaml(strict_json(text).replace("\t", " "))


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
        # tomllib has no positions, and the text is valid TOML here, so a search for headers and names of keys is
        # enough.
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
        # Colossal-AI's files write sections as calls, `zero = dict(model_config=dict(...))`, or as dict literals.
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
