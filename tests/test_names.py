"""Names of methods: the field's terms. A verb that can mean anything names nothing by itself.

Memory is allocated and freed, a gradient is accepted and discarded, a trace is reset, a copy is dropped, a peak is
popped: read, and measured from then on.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gemini", "sharding", "optim")
VAGUE = {"settle", "take", "give", "keep", "forget", "move", "renew"}
# "Class.method" -> the reason: a Protocol of another library, for example, which calls the method by this name.
ALLOWED: dict[str, str] = {}


def methods(text: str) -> Iterator[tuple[str, int]]:
    """`Class.method` and its line, of every class in the module `text`."""
    for owner in ast.walk(ast.parse(text)):
        for each in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{owner.name}.{each.name}", each.lineno


def vague(text: str) -> list[tuple[str, int]]:
    """The methods of the module `text` that have one of these names, with or without underscores."""
    return [(name, line) for name, line in methods(text) if name.rpartition(".")[2].strip("_") in VAGUE]


def sources() -> Iterator[Path]:
    for folder in PACKAGES:
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_no_method_has_a_verb_for_its_name_that_can_mean_anything() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources()
        for name, line in vague(path.read_text())
        if name not in ALLOWED
    ]
    assert not found, "say what is done, to what: allocate, free, accept, discard, reset_trace\n" + "\n".join(found)


def test_the_list_of_what_is_allowed_has_a_reason_each_and_nothing_that_is_gone() -> None:
    assert all(reason.strip() for reason in ALLOWED.values())
    assert not set(ALLOWED) - {name for path in sources() for name, _ in vague(path.read_text())}


def test_the_rule_about_names_sees_what_it_should() -> None:
    for wrong in ("take", "_give", "__settle__", "forget"):
        assert vague(f"class A:\n    def {wrong}(self): ..."), wrong
    for right in ("take_home", "allocate", "given", "moving"):
        assert not vague(f"class A:\n    def {right}(self): ..."), right
    assert vague("def f():\n    class A:\n        async def move(self): ...")
    assert not vague("def take(): ...")
