"""House rule: a public function that raises says so in its docstring, in all packages, exported by gemini or not."""

import ast
from collections.abc import Iterator

import pytest

from tests.test_house_rules import PACKAGES, ROOT, sources
from tests.test_public_names import RAISES

NOT_READ = {"gemini/cli": "a command's docstring is its --help; it prints its errors and exits"}


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What is in a function, but for what is in functions and classes inside it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def raises(function: ast.FunctionDef) -> bool:
    """A `raise` of an error of its own: neither one that passes on what came, nor one that cannot happen."""
    errors = [node.exc for node in own_nodes(function) if isinstance(node, ast.Raise) and node.exc is not None]
    return any(not ast.unparse(error).startswith(("AssertionError", "NotImplementedError")) for error in errors)


def silent(body: list[ast.stmt], prefix: str = "") -> list[str]:
    """Public functions, and methods of public classes, that raise without a word about it in their docstring."""
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += silent(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if raises(node) and not RAISES.search(ast.get_docstring(node) or ""):
                found.append(f"{node.lineno} {prefix}{node.name}")
    return found


def test_a_public_function_that_raises_says_so() -> None:
    found = [
        f"{name}:{each}"
        for path in sources(*PACKAGES)
        if (name := path.relative_to(ROOT).as_posix()).rpartition("/")[0] not in NOT_READ
        for each in silent(ast.parse(path.read_text()).body)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_silent"),
    [
        ("def f():\n    '''Of it.'''\n    raise ValueError(1)\n", True),
        ("def f():\n    if 1:\n        raise ValueError(1)\n", True),
        ("class A:\n    def f(self):\n        '''Of it.'''\n        raise error\n", True),
        ("def f():\n    '''Raises ValueError.'''\n    raise ValueError(1)\n", False),
        ("def _f():\n    raise ValueError(1)\n", False),
        ("def f():\n    def inner(): raise ValueError(1)\n    return inner\n", False),
        ("def f():\n    try: g()\n    except OSError: raise\n", False),
        ("def f():\n    raise AssertionError('unreachable')\n", False),
    ],
)
def test_the_rule_about_errors_sees_what_it_should(text: str, is_silent: bool) -> None:
    assert bool(silent(ast.parse(text).body)) == is_silent
