"""House rule: what has a lifecycle (states, pins, slots) is written by its own object, by one class of a hierarchy.

A reader who wants to know who changes it looks in one place, where a method says what happens, and when it may. Other
fields without an underscore may be written anywhere in the package of their class, such as gemini/runtime: a method
that does nothing but assign tells a reader no more than the assignment. Other packages call a method.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from tests.test_house_rules import PACKAGES, ROOT, sources
from tests.test_state_writers import MUTATORS, STATES, writes

# Numbers only: what placement/ writes are attributes of its own that are called the same.
NUMBERS = "gemini/placement/"
LIFECYCLES = {field for fields in STATES.values() for field in fields}
LIFECYCLES |= {"pins", "pinned", "own_slot", "slots", "gradient_slots", "slot_by_storage"}
CONTAINERS = {"list", "dict", "set", "bytearray", "Counter", "defaultdict"}
CHANGE = {*MUTATORS, "add", "discard"}
# Attributes of torch's tensors and modules, which classes of ours have too.
TORCHS = {"data", "_buffers", "_parameters"}
# Writes by others: "FILE EXPRESSION", and the reason.
BY_OTHERS = {
    "gemini/optimizer/elementwise.py self._worker.state": "a torch optimizer's dict of states by parameter",
    "gemini/optimizer/whole_tensor.py self._worker.state": "the same",
    "gemini/model/operators.py parameter.grad": "a tensor's",
    "gemini/optimizer/elementwise.py worker.state": "the same",
    "gemini/optimizer/given.py optimizer.state": "the given torch optimizer's, which has none any more",
    "gemini/replan/trainability.py optimizer.states": "`discard` is the states' own method",
    "gemini/engine/config/config.py noted._ignored": "a config's, by the config that copies itself",
    "gemini/engine/config/config.py noted._constants": "the same",
    "gemini/integrations/lightning.py module.forward": "of Lightning's module",
    "gemini/integrations/lightning.py each._device": "of Lightning's modules",
}


@dataclass(frozen=True)
class Fields:
    """The fields of one class: what it declares, which of them are containers, and the methods that write each."""

    file: str
    bases: tuple[str, ...]
    names: frozenset[str]
    containers: frozenset[str]
    writers: dict[str, set[str]]


def fields_of(owner: ast.ClassDef, file: str) -> Fields:
    """What the class says of its fields."""
    annotated = [node for node in ast.walk(owner) if isinstance(node, ast.AnnAssign)]
    declared = {ast.unparse(each.target).removeprefix("self."): ast.walk(each.annotation) for each in annotated}
    kinds = {name: {node.id for node in nodes if isinstance(node, ast.Name)} for name, nodes in declared.items()}
    writers: dict[str, set[str]] = {}
    for write in writes(owner):
        if write.base == "self":
            writers.setdefault(write.field, set()).add(write.function)
    return Fields(
        file,
        tuple(ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases),
        frozenset(name for name in (*writers, *(ast.unparse(e.target) for e in annotated if e in owner.body))),
        frozenset(name for name, its in kinds.items() if its & CONTAINERS),
        writers,
    )


@cache
def all_fields() -> dict[str, Fields]:
    """The fields of our classes, by the class's name."""
    return {
        node.name: fields_of(node, path.relative_to(ROOT).as_posix())
        for path in sources(*PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def _changes(text: str, containers: frozenset[str]) -> Iterator[tuple[int, str, str]]:
    """(line, base, field) of what the module `text` writes, or changes in a container."""
    tree = ast.parse(text)
    yield from ((write.line, write.base, write.field) for write in writes(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGE:
            changed = node.func.value
            if isinstance(changed, ast.Attribute) and changed.attr in containers:
                yield node.lineno, ast.unparse(changed.value), changed.attr


def written_by_others(text: str, classes: Iterable[Fields], package: str = "") -> list[tuple[int, str]]:
    """(line, expression) where the module `text` writes a field of one of `classes` on another object than `self`.

    It may write fields of classes in its own `package`, but for those that have a lifecycle or are private.
    """
    classes = list(classes)
    own = frozenset[str]().union(*(each.names for each in classes if package and package_of(each.file) == package))
    may = {name for name in own if name not in LIFECYCLES and not name.startswith("_")}
    names = frozenset[str]().union(*(each.names for each in classes)) - may
    containers = frozenset[str]().union(*(each.containers for each in classes))
    changes = _changes(text, containers)
    return [
        (line, f"{base}.{field}") for line, base, field in changes if base not in ("self", "cls") and field in names
    ]


def package_of(file: str) -> str:
    """The folder of the first two levels, such as gemini/runtime; files in gemini/ itself have none."""
    return "/".join(file.split("/")[:2]) if file.count("/") > 1 else ""


def test_a_lifecycle_is_written_by_its_own_object_and_no_field_by_another_package() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in sources("gemini")]
    assert any(name.startswith(NUMBERS) for name in files), "the folder has another name: the rule would be blind"
    owners = [each for each in all_fields().values() if each.file in files and not each.file.startswith(NUMBERS)]
    found, unused = [], {*BY_OTHERS}
    for path in sources("gemini"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(NUMBERS):
            continue
        for line, expression in written_by_others(path.read_text(), owners, package_of(name)):
            if f"{name} {expression}" not in BY_OTHERS and expression.rpartition(".")[2] not in TORCHS:
                found.append(f"{name}:{line} {expression}")
            unused.discard(f"{name} {expression}")
    assert not found, "give its owner a method that says what happens:\n" + "\n".join(found)
    assert not unused, "nobody writes these any more, or everybody may: take them off"


def _ancestors(name: str, classes: dict[str, Fields]) -> Iterator[str]:
    for base in classes[name].bases if name in classes else ():
        if base in classes and base != name:
            yield base
            yield from _ancestors(base, classes)


def written_twice(classes: dict[str, Fields]) -> list[str]:
    """Fields that methods of two classes of one hierarchy change after construction, though they may not.

    In one package a class and its heir may both change what has no lifecycle.
    """
    construction = {"__init__", "__post_init__"}
    return [
        f"{name}.{field} and {other}.{field}"
        for name, its in classes.items()
        for other in dict.fromkeys(_ancestors(name, classes))
        for field, writers in its.writers.items()
        if writers - construction and classes[other].writers.get(field, set()) - construction
        if field in LIFECYCLES or not package_of(its.file) or package_of(its.file) != package_of(classes[other].file)
    ]


def test_one_class_of_a_hierarchy_changes_a_field() -> None:
    assert not written_twice(all_fields())


def _classes(text: str, file: str = "") -> dict[str, Fields]:
    return {n.name: fields_of(n, file) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)}


_OWNER = """
class Owner:
    count: int = 0

    def __init__(self):
        self.items: list[int] = []
        self.place = 1
"""


@pytest.mark.parametrize(
    ("line", "is_wrong"),
    [
        ("owner.count += 1", True),
        ("self.owner.place = 2", True),
        ("self.owners[0].place = 2", True),
        ("owner.items[0] = 1", True),
        ("owner.items.append(1)", True),
        ("setattr(owner, 'place', 1)", True),
        ("del owner.place", True),
        ("owner.place.append(1)", False),
        ("self.place = 2", False),
        ("owner.tensor.data = 2", False),
        ("x = owner.items", False),
    ],
)
def test_the_rule_about_owners_sees_a_write_by_others(line: str, is_wrong: bool) -> None:
    assert bool(written_by_others(f"def f(self, owner):\n    {line}\n", _classes(_OWNER).values())) == is_wrong


@pytest.mark.parametrize(
    ("line", "package", "is_wrong"),
    [
        ("owner.count += 1", "gemini/runtime", False),
        ("owner.items.append(1)", "gemini/runtime", False),
        ("owner.count += 1", "gemini/model", True),
        ("owner.items.append(1)", "gemini/model", True),
        ("owner.count += 1", "", True),
        ("owner.pins += 1", "gemini/runtime", True),
        ("self.owner.slot = None", "gemini/runtime", True),
        ("owner._hidden = 1", "gemini/runtime", True),
    ],
)
def test_a_package_may_write_plain_fields_of_its_classes(line: str, package: str, is_wrong: bool) -> None:
    text = _OWNER + "        self.pins = self._hidden = 0\n        self.slot = None\n"
    classes = _classes(text, "gemini/runtime/owner.py").values()
    assert bool(written_by_others(f"def f(self, owner):\n    {line}\n", classes, package)) == is_wrong


@pytest.mark.parametrize(
    ("method", "is_wrong"),
    [("def end(self):\n        self.place = 3", True), ("def __init__(self):\n        self.place = 3", False)],
)
def test_the_rule_about_hierarchies_sees_two_writers(method: str, is_wrong: bool) -> None:
    base = _OWNER + "    def begin(self):\n        self.place = 2\n"
    text = f"{base}\nclass Heir(Owner):\n    {method}\n"
    assert bool(written_twice(_classes(text))) == is_wrong
    assert not written_twice(_classes(text, "gemini/runtime/owner.py")), "in one package"
    assert bool(written_twice(_classes(text.replace("place", "pins"), "gemini/runtime/owner.py"))) == is_wrong
