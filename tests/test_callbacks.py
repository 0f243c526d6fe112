"""House rule: no object is given a function after it was made. What it needs it is given when it is made."""

import ast
from collections.abc import Iterator

import pytest

from tests.test_house_rules import PACKAGES, ROOT, sources

# "FILE TARGET" of what is not an object of ours, and why it is assigned to.
ON_OTHERS = {
    "gemini/integrations/lightning.py module.forward": "Lightning calls the user's module, and the model must run its "
    "step: for the length of one call, as Lightning's own strategies do",
    "gemini/integrations/lightning.py module.[name]": "Lightning would ask the user's module for its optimizers twice: "
    "for the length of that call the module answers as it has",
    "gemini/model/operators.py module._compiled_call_impl": "torch's slot for what a compiled module's call runs",
    "gemini/ranks/exit_report.py sys.excepthook": "Python's slot for what reports an exception that ends the process",
    "gemini/building/zero_init.py nn.Parameter.__new__": "torch's class, inside a context that puts it back",
}
ADDING = {"append", "appendleft", "insert", "add", "extend", "setdefault", "update", "__setitem__"}
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def our_methods() -> set[str]:
    """Names of methods, but for properties and for what is an attribute of some object too."""
    methods, attributes = set(), set()
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                attributes.update(ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign))
                for each in (each for each in node.body if isinstance(each, ast.FunctionDef)):
                    (attributes if each.decorator_list else methods).add(each.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) == "self":
                    attributes.add(node.attr)
    return methods - attributes


class Callbacks:
    """What a module puts onto objects made elsewhere, as (line, target, text)."""

    def __init__(self, methods: set[str]) -> None:
        self.methods = methods
        self.found: list[tuple[int, str, str]] = []

    def look(self, node: ast.AST, functions: frozenset[str] = frozenset()) -> None:
        """functions: names of the functions that are defined around the node."""
        if isinstance(node, SCOPES):
            its = [each.name for each in ast.iter_child_nodes(node) if isinstance(each, SCOPES[1:3])]
            functions = functions if isinstance(node, ast.ClassDef) else functions | frozenset(its)
        for target, value in self._given(node):
            if self._is_function(value, functions):
                self.found.append((getattr(node, "lineno", 0), target, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            self.look(child, functions)

    def _is_function(self, value: ast.expr | None, functions: frozenset[str]) -> bool:
        if isinstance(value, ast.Attribute):
            return value.attr in self.methods
        if isinstance(value, ast.Name):
            return value.id in functions
        if isinstance(value, ast.IfExp):
            return self._is_function(value.body, functions) or self._is_function(value.orelse, functions)
        if isinstance(value, ast.BoolOp | ast.Tuple | ast.List):
            parts = value.values if isinstance(value, ast.BoolOp) else value.elts
            return any(self._is_function(each, functions) for each in parts)
        if isinstance(value, ast.NamedExpr):
            return self._is_function(value.value, functions)
        makes = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("partial", "MethodType")
        return makes or isinstance(value, ast.Lambda)

    def _given(self, node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
        """(where, what) of everything that this node puts onto an object."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _onto_objects(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            yield from _onto_objects(node.target, node.value)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("setattr", "object.__setattr__") and len(node.args) == 3:
                if (owner := ast.unparse(node.args[0])) != "self":
                    key = node.args[1]
                    attribute = key.value if isinstance(key, ast.Constant) else f"[{ast.unparse(key)}]"
                    yield f"{owner}.{attribute}", node.args[2]
            elif isinstance(node.func, ast.Attribute) and node.func.attr in ADDING:
                holder = _held_by_another(node.func.value)
                for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                    if holder is not None:
                        yield holder, value


def _held_by_another(container: ast.expr) -> str | None:
    """`x.hooks`, `vars(x)` or an item of these, where x is not self."""
    while isinstance(container, ast.Subscript):
        container = container.value
    if isinstance(container, ast.Call) and ast.unparse(container.func) == "vars" and container.args:
        owner = ast.unparse(container.args[0])
    elif isinstance(container, ast.Attribute):
        owner = ast.unparse(container.value)
    else:
        return None
    return None if owner == "self" else ast.unparse(container)


def _onto_objects(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """Of an assignment, what goes onto an object; tuples item by item."""
    if isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value] * len(target.elts)
        for each, part in zip(target.elts, parts, strict=False):
            yield from _onto_objects(each, part)
    elif isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
        yield ast.unparse(target), value
    elif isinstance(target, ast.Subscript) and (holder := _held_by_another(target.value)) is not None:
        yield holder, value


def assigned_callbacks(text: str, methods: set[str]) -> list[tuple[int, str, str]]:
    """Functions that the module `text` gives to objects made elsewhere. methods: names of our methods."""
    callbacks = Callbacks(methods)
    callbacks.look(ast.parse(text))
    return callbacks.found


def test_no_object_is_given_a_function_after_it_was_made() -> None:
    """Whoever reads a method sees what it calls."""
    methods = our_methods()
    found = {
        f"{path.relative_to(ROOT).as_posix()} {target}": f"{path.relative_to(ROOT)}:{line} {text}"
        for path in sources(*PACKAGES)
        for line, target, text in assigned_callbacks(path.read_text(), methods)
    }
    wrong = [text for key, text in found.items() if key not in ON_OTHERS]
    assert not wrong, "\n".join(wrong)
    assert not ON_OTHERS.keys() - found.keys(), "these are not there any more: take them off ON_OTHERS"


@pytest.mark.parametrize(
    "line",
    [
        "fetcher.on_touch = self.touch",
        "self.a.b = lambda: None",
        "a.b: Any = c.d.touch",
        "def step(): ...\nother.forward = step",
        "a.on, b = self.touch, 1",
        "a.on, (b.on, c) = 1, (self.touch, 2)",
        "fetcher.on = partial(self.touch, 1)",
        "fetcher.on = functools.partial(f)",
        "fetcher.on = types.MethodType(f, fetcher)",
        "fetcher.on = self.touch if x else None",
        "fetcher.on = given or self.touch",
        "setattr(fetcher, 'on', self.touch)",
        "object.__setattr__(fetcher, 'on', self.touch)",
        "vars(fetcher)['on'] = self.touch",
        "vars(fetcher).update(on=self.touch)",
        "fetcher.__dict__['on'] = self.touch",
        "fetcher.hooks['on'] = self.touch",
        "fetcher.hooks.append(self.touch)",
        "fetcher.hooks += [self.touch]",
        "self.part.hooks.append(lambda: None)",
    ],
)
def test_the_rule_about_callbacks_sees_one(line: str) -> None:
    assert assigned_callbacks(line, {"touch"})
    assert assigned_callbacks("class A:\n def f(self):\n  " + line.replace("\n", "\n  "), {"touch"})


@pytest.mark.parametrize(
    "line",
    [
        "self.touched = other.touch",
        "a.b = touch",
        "a.touch = self.count",
        "touch = self.touch",
        "self.hooks.append(self.touch)",
        "hooks.append(self.touch)",
        "a.b, self.c = 1, self.touch",
        "setattr(self, 'on', self.touch)",
        "a.b = self.touch()",
    ],
)
def test_the_rule_about_callbacks_passes_over_what_is_none(line: str) -> None:
    assert not assigned_callbacks(line, {"touch"})
