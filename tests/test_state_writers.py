"""House rule: what is true together is one state, and only that state's own methods write it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent

import pytest

from tests.test_house_rules import PACKAGES, ROOT, sources

FIRED = {"become", "note_fired", "note_all_fired"}
BOOKS = {
    "state": {"become"},
    "content": {"become"},
    **{field: {"become"} for field in ("slot", "payload", "views", "spilled")},
    "fired": FIRED,
    "num_fired": FIRED,
    "expects": FIRED,
    "reduced_state": {"become_reduced"},
    "first_backward": {"become_reduced", "outlive_step"},
    "unsynced_state": {"become_unsynced"},
}
# By class: the fields of its state, and the methods that write them.
STATES = {
    "Gradient": BOOKS,
    "ChunkGradient": {field: set[str]() for field in BOOKS},  # only `Gradient` writes these
    "Chunk": {field: {"become"} for field in ("state", "slot", "payload")},
    "StepPosition": {"now": {"set", "return_to", "reset"}},
    "Communicator": {"plan_hash": {"follow_plan"}},
    "GradientBooks": {"synchronizes": {"unsynchronized"}},
    "Payloads": {"has_room": {"take_room", "miss_room", "give_room"}},
    "GradStore": {
        "in_backward": {"begin_backward", "ending_backward", "abandon_backward"},
        "expects_scaled_loss": {"expect_scaled_losses"},
        "loss_is_scaled": {"begin_scaled_loss", "end_scaled_loss"},
    },
}
CONTAINERS = {"fired", "expects"}  # an item that is written through a local name is written all the same
# Attributes of other classes that are called the same: "FILE" or "FILE EXPRESSION", and why it is no state of ours.
NAMESAKES = {
    "gemini/optimizer/elementwise.py self._worker.state": "a torch optimizer's dict of states by parameter",
    "gemini/optimizer/whole_tensor.py self._worker.state": "the same",
}
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)
MUTATORS = {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update", "__setitem__"}


@dataclass(frozen=True)
class Write:
    """An expression `base.field` that a module writes, or an item of it."""

    line: int
    base: str
    field: str
    function: str
    owner: str  # the class around it
    text: str


def _attributes_of(node: ast.expr) -> str | None:
    """The expression whose attributes `vars(...)` or `....__dict__` is."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        return ast.unparse(node.args[0])
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return ast.unparse(node.value)
    return None


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _written_by(node: ast.AST, aliases: dict[str, ast.Attribute]) -> Iterator[tuple[str, str]]:
    """(base, field) that this node writes itself."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        target: ast.expr = node
        if isinstance(node, ast.Subscript) and (base := _attributes_of(node.value)) is not None:
            yield from ((base, text) for text in _texts([node.slice]))
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name) and target is not node:
            target = aliases.get(target.id, target)
        if isinstance(target, ast.Attribute):
            yield ast.unparse(target.value), target.attr
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name.rpartition(".")[2] in ("setattr", "delattr", "__setattr__", "__delattr__") and node.args:
            is_bound = name.endswith("__") and not name.startswith(("object.", "super()"))
            base = name.rpartition(".")[0] if is_bound else ast.unparse(node.args[0])
            yield from ((base, text) for text in _texts(node.args))
        elif isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            owner = node.func.value
            if (attributes := _attributes_of(owner)) is not None:
                names = [keyword.arg for keyword in node.keywords if keyword.arg]
                yield from ((attributes, text) for text in [*names, *_texts(node.args)])
            if isinstance(owner, ast.Name):
                owner = aliases.get(owner.id, owner)
            if isinstance(owner, ast.Attribute) and owner.attr in CONTAINERS:
                yield ast.unparse(owner.value), owner.attr


def _aliases(scope: ast.AST) -> dict[str, ast.Attribute]:
    """Names of the containers that belong to a state, but for those of functions inside."""
    found: dict[str, ast.Attribute] = {}
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, SCOPES):
            continue
        found.update(_aliases(node))
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(name, ast.Name) and isinstance(value, ast.Attribute) and value.attr in CONTAINERS:
                        found[name.id] = value
    return found


def writes(
    node: ast.AST, function: str = "", owner: str = "", aliases: dict[str, ast.Attribute] | None = None
) -> Iterator[Write]:
    """Everything below `node` that writes an attribute, with the innermost function that does, and class."""
    if isinstance(node, ast.ClassDef):
        owner = node.name
    if isinstance(node, SCOPES):
        function, aliases = getattr(node, "name", ""), {**(aliases or {}), **_aliases(node)}
    for base, field in _written_by(node, aliases or {}):
        yield Write(getattr(node, "lineno", 0), base, field, function, owner, ast.unparse(node))
    for child in ast.iter_child_nodes(node):
        yield from writes(child, function, owner, aliases)


def written_states(name: str, text: str) -> list[str]:
    """Writes to fields of a state in the module `text`, the file `name`, by others than the state's own methods."""
    fields = {field for each in STATES.values() for field in each}
    found = []
    for write in writes(ast.parse(text)):
        is_self, own = write.base == "self", STATES.get(write.owner, {})
        if is_self and (write.function == "__init__" or write.function in own.get(write.field, {write.function})):
            continue  # the state's own method, or another class that has an attribute of that name
        is_namesake = name in NAMESAKES or f"{name} {write.base}.{write.field}" in NAMESAKES
        if write.field in fields and not is_namesake:
            found.append(f"{name}:{write.line} {write.text} in {write.function}()")
    return found


def test_a_state_is_written_by_its_own_methods_only() -> None:
    found = [
        each
        for path in sources(*PACKAGES)
        for each in written_states(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


def test_every_class_that_has_a_state_is_there() -> None:
    nodes = [node for path in sources("gemini") for node in ast.walk(ast.parse(path.read_text()))]
    assert {node.name for node in nodes if isinstance(node, ast.ClassDef)} >= STATES.keys()


def test_every_namesake_is_still_there() -> None:
    fields = {field for each in STATES.values() for field in each}
    for each in NAMESAKES:
        name, _, expression = each.partition(" ")
        found = {f"{w.base}.{w.field}" for w in writes(ast.parse((ROOT / name).read_text())) if w.field in fields}
        assert expression in found if expression else found, f"{each} writes nothing of that name: take it off"


ANY = "gemini/runtime/any.py"


@pytest.mark.parametrize(
    "line",
    [
        "gradient.slot = None",
        "self.chunk.slot, chunk.payload = None, None",
        "for each in chunks: each.state = None",
        "for chunk.slot in slots: pass",
        "other_chunk.slot = None",
        "self._chunk.slot = None",
        "self.own.payload = None",
        "del victim.payload",
        "gradient.num_fired += 1",
        "gradient.fired[i] = 1",
        "gradient.expects[:] = []",
        "gradient.expects.clear()",
        "fired, got = gradient.fired, gradient.got; fired[i] = got[i] = 1",
        "expects = gradient.expects; expects.append(None)",
        "setattr(chunk, 'state', 1)",
        "object.__setattr__(chunk, 'state', 1)",
        "chunk.__setattr__('state', 1)",
        "vars(chunk)['state'] = 1",
        "chunk.__dict__.update(state=1)",
        "(lambda: setattr(chunk, 'state', 1))()",
    ],
)
def test_the_rule_about_states_sees_a_write(line: str) -> None:
    assert written_states(ANY, f"def f(self, chunk, chunks, gradient, i):\n    {line}\n"), "without an import"
    assert written_states(ANY, line), "outside of a function"


@pytest.mark.parametrize(
    "line",
    ["gradient.wide = None", "slot.chunk = 3", "self.state = None", "self.state['step'] = 1", "x = chunk.state"],
)
def test_the_rule_about_states_passes_over_what_is_none(line: str) -> None:
    assert not written_states(ANY, f"def f(self, slot, gradient):\n    {line}\n")


@pytest.mark.parametrize(
    ("owner", "method", "is_wrong"),
    [
        ("Gradient", "def become_reduced(self):\n    self.state = None\n", True),
        ("Gradient", "def become(self):\n    self.state = None\n", False),
        ("ChunkGradient", "def become(self):\n    self.state = None\n", True),
        ("ChunkGradient", "def become(self):\n    self.chunk.slot = None\n", True),
        ("Gradient", "def note_fired(self, i):\n    self.fired[i] = 1\n", False),
        ("Gradient", "def expect(self, i):\n    self.fired[i] = 1\n", True),
        ("Chunk", "def end_residence(self):\n    self.payload = None\n", True),
        ("Chunk", "def become(self):\n    setattr(self, 'payload', None)\n", False),
    ],
)
def test_the_rule_about_states_knows_their_methods(owner: str, method: str, is_wrong: bool) -> None:
    text = f"class {owner}:\n" + indent(method, "    ")
    assert bool(written_states(ANY, text)) == is_wrong
