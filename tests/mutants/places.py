"""Where the change of a mutant is: found by name and syntax, so that code may move between files and be formatted.

What is new takes the place of the old node's text; every other line stays as it is.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Any

from tests.mutants.mutant import Mutant

PACKAGES = ("gemini", "sharding", "optim")
_BLOCKS = ("body", "orelse", "finalbody", "handlers")
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.List, ast.Dict, ast.Set)

Found = tuple[int, int, str]  # from where to where in the source, in bytes, and what comes there


@dataclass(frozen=True)
class Place:
    """A mutant's place: the file below the root, and all its text with the change."""

    path: str
    mutated: bytes


class Code:
    """The packages below `root`, each file parsed once."""

    def __init__(self, root: Path) -> None:
        self._defined: dict[str, list[tuple[str, bytes, ast.AST]]] = {}
        for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
            source = path.read_bytes()
            for name, node in _definitions(ast.parse(source)):
                self._defined.setdefault(name, []).append((path.relative_to(root).as_posix(), source, node))

    def places(self, mutant: Mutant) -> list[Place]:
        """The places that have `old`, or the one with the mutant's index; there should be one."""
        found = [
            Place(path, source[:start] + new.encode() + source[end:])
            for path, source, node in self._defined.get(mutant.where, [])
            if path.startswith(mutant.package.replace(".", "/"))
            for start, end, new in changes(source, node, mutant.old, mutant.new)
        ]
        return found if mutant.index is None else found[mutant.index : mutant.index + 1]

    def elsewhere(self, mutant: Mutant) -> list[str]:
        """Methods and functions of the same last name that have `old`: where it may have gone."""
        last = mutant.where.rpartition(".")[2]
        names = [name for name in self._defined if name.rpartition(".")[2] == last and name != mutant.where]
        return [name for name in names if self.places(replace(mutant, where=name, package="", index=None))]


def _definitions(scope: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, node) of classes, functions, and the names that a module or a class assigns."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + ast.unparse(target), node) for target in targets)
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node, prefix)


def changes(source: bytes, scope: ast.AST, old: str, new: str) -> Iterator[Found]:
    """Every place in `scope`, a node of `source`, where `old` is."""
    wanted, instead = _expression(old), _expression(new)
    if old.endswith(":"):
        yield from _heads(source, scope, _head(_statements(old)[0]), new.removesuffix(":"))
    elif wanted is not None and instead is not None:
        text = new if isinstance(instead, _ATOMS) and not isinstance(wanted, ast.GeneratorExp) else f"({new})"
        dump = ast.dump(wanted)
        for node in _walk(scope):
            if type(node) is type(wanted) and ast.dump(node) == dump:
                yield *_span(source, node, node), text
    else:
        yield from _sequences(source, scope, [ast.dump(node) for node in _statements(old)], new)


def _heads(source: bytes, scope: ast.AST, wanted: str, new: str) -> Iterator[Found]:
    """Lines that begin a block, without their colons."""
    for node in _walk(scope):
        if isinstance(node, ast.stmt | ast.ExceptHandler) and hasattr(node, "body") and _head(node) == wanted:
            start, _ = _span(source, node, node)
            before_body = source[start : _span(source, node.body[0], node.body[0])[0]]
            yield start, start + _last_colon(before_body), _placed(source, start, new)


def _sequences(source: bytes, scope: ast.AST, wanted: list[str], new: str) -> Iterator[Found]:
    """Statements that follow one another in a block."""
    for node in _walk(scope):
        for block in (getattr(node, name, None) for name in _BLOCKS):
            statements = block if isinstance(block, list) and len(block) >= len(wanted) else []
            for first in range(len(statements) - len(wanted) + 1):
                some = statements[first : first + len(wanted)]
                if all(ast.dump(each) == dump for each, dump in zip(some, wanted, strict=True)):
                    start, end = _span(source, some[0], some[-1])
                    rest = "pass" if len(some) == len(statements) else ""
                    yield start, end, _placed(source, start, new) or rest


def _walk(scope: ast.AST) -> Iterator[Any]:
    """All nodes in the order of the text, but for those in f-strings, which have no places of their own in 3.11."""
    yield scope
    if not isinstance(scope, ast.JoinedStr):
        for child in ast.iter_child_nodes(scope):
            yield from _walk(child)


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(f"({text}\n)", mode="eval").body if text.strip() else None
    except SyntaxError:
        return None


def _statements(text: str) -> list[ast.stmt] | list[ast.ExceptHandler]:
    if text.startswith("except"):
        handled = ast.parse(f"try: ...\n{text} ...").body[0]
        assert isinstance(handled, ast.Try)
        return handled.handlers
    return ast.parse(f"{text} ..." if text.endswith(":") else text).body


def _head(node: ast.AST) -> str:
    """The node without its blocks."""
    return type(node).__name__ + "".join(
        f" {name}={ast.dump(each) if isinstance(each, ast.AST) else each}"
        for name, value in ast.iter_fields(node)
        if name not in _BLOCKS
        for each in (value if isinstance(value, list) else [value])
    )


def _span(source: bytes, first: Any, last: Any) -> tuple[int, int]:
    """From where to where these nodes and all between them stand, decorators included."""
    lines = source.splitlines(keepends=True)
    start, column = first.lineno, first.col_offset
    if getattr(first, "decorator_list", ()):
        start = first.decorator_list[0].lineno  # the column is that of the @ as well
    return (
        sum(map(len, lines[: start - 1])) + column,
        sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset,
    )


def _last_colon(head: bytes) -> int:
    """Where the colon is that ends the head of a block."""
    tokens = tokenize.tokenize(io.BytesIO(head.rstrip() + b" ...\n").readline)
    line, column = [token.start for token in tokens if token.exact_type == tokenize.COLON][-1]
    lines = head.decode().splitlines(keepends=True)
    return len("".join([*lines[: line - 1], lines[line - 1][:column]]).encode())


def _placed(source: bytes, start: int, new: str) -> str:
    """The statements `new`, indented for where they come."""
    column = start - source.rfind(b"\n", 0, start) - 1
    is_elif = source[start : start + 5] == b"elif "
    return ("el" if is_elif else "") + indent(new.strip("\n"), " " * column).lstrip()
