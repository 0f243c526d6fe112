"""House rule: no expression goes through more than three attributes of ours, one after the other.

Who writes `self.model.chunk_manager.grads.end_step(...)` knows how four objects are made. Files that did so when the
rule came are listed with how often they do; a number only goes down, and a file without any is taken off.
"""

import ast

import pytest

from tests.test_house_rules import PACKAGES, ROOT, sources

MAX_ATTRIBUTES = 3
LONG_CHAINS: dict[str, int] = {}


def our_attributes() -> set[str]:
    """Names of attributes and methods of our classes."""
    names = set()
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                names.update(each.name for each in node.body if isinstance(each, ast.FunctionDef))
                names.update(ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign))
    return names - {"type"}  # configs have it, and so has torch.device


def _before(node: ast.expr) -> ast.expr:
    """The expression that `node` takes an attribute of; a call and a subscript hand on what they were taken of."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def long_chains(text: str, names: set[str]) -> list[str]:
    """Expressions `a.b.c.d.e` of the module `text` whose attributes are all ours; `a.b(1).c[2].d.e` is one, too."""
    attributes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    inner = {id(_before(node.value)) for node in attributes}
    found = []
    for last in attributes:
        chain: list[str] = []
        node: ast.expr = last
        while isinstance(node, ast.Attribute) and id(last) not in inner:
            chain.append(node.attr)
            node = _before(node.value)
        is_torchs = isinstance(node, ast.Name) and node.id == "torch"
        if not is_torchs and len(chain) > MAX_ATTRIBUTES and names.issuperset(chain):
            found.append(f"{last.lineno} {ast.unparse(last)}")
    return found


def test_no_chain_of_our_attributes_is_longer_than_three_but_those_that_were() -> None:
    names = our_attributes()
    found = {path.relative_to(ROOT).as_posix(): long_chains(path.read_text(), names) for path in sources(*PACKAGES)}
    too_many = {name: chains for name, chains in found.items() if len(chains) > LONG_CHAINS.get(name, 0)}
    assert not too_many, "give the object what it needs when it is made"
    fewer = {name: len(found.get(name, ())) for name, count in LONG_CHAINS.items() if len(found.get(name, ())) < count}
    assert not fewer, "these have fewer now: lower LONG_CHAINS"


@pytest.mark.parametrize(
    ("text", "is_long"),
    [
        ("self.a.b.c.d", True),
        ("a.b.c.d.e(1)", True),
        ("self.a.b.c", False),
        ("torch.a.b.c.d", False),
        ("x.a.b.c.z", False),
        ("self.a.b(1).c.d", True),
        ("self.a[0].b.c().d[1]", True),
        ("self.a(x.b.c.d).b.c", False),
        ("f(x).a.b.c.d", True),
        ("self.a.b(self.a.b.c.d)", True),
    ],
)
def test_the_rule_about_chains_sees_what_it_should(text: str, is_long: bool) -> None:
    assert bool(long_chains(text, set("abcde"))) == is_long
