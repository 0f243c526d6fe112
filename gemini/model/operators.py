"""Which modules are operators: those that own parameters directly, and leaves, which are fetched whole.

A leaf is a module whose children's parameters are used without calling the children: attention and recurrent
modules of torch, and what the user marks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

_LEAVES: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.RNNBase)


@dataclass(frozen=True)
class FoundOperator:
    """An operator and all parameters that its forward needs; tied ones appear in every operator that has them."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    ancestors: tuple[int, ...]  # places of the operators that are on the call stack around this one


def find_operators(root: nn.Module) -> list[FoundOperator]:
    """Operators in module order, parents before children. The same module at two places is one operator."""
    found: list[FoundOperator] = []
    seen: set[nn.Module] = set()  # membership only

    def visit(module: nn.Module, name: str, above: tuple[int, ...]) -> None:
        if module in seen:
            return
        seen.add(module)
        is_leaf = isinstance(module, _LEAVES)
        parameters = tuple(module.parameters(recurse=is_leaf))
        if parameters:
            found.append(FoundOperator(name, module, parameters, above))
            above = (*above, len(found) - 1)
        if is_leaf:
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, above)

    visit(root, "", ())
    return found
