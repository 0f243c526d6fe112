"""Which modules are operators: modules that own parameters directly, and leaves, which are fetched whole.

A leaf is a module that uses its children's parameters without calling the children (attention and recurrent modules
of torch, compiled modules), or that chooses its children by data. Ranks may choose differently, so if parameters are
gathered, all parameters of such a leaf are gathered together, in forward and backward: see leaf.py.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from gemini.access.external import external_parameters
from gemini.model.compiled import is_compiled
from gemini.model.leaf_marks import chooses, is_marked
from gemini.placement.specs import OperatorSpec

# `nn.MultiheadAttention` passes `out_proj.weight` to a function and never calls `out_proj`, whose hooks would not run.
_LEAVES: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.RNNBase)


Found = list[tuple[nn.Module, OperatorSpec]]


def find_operators(
    root: nn.Module, gathers: bool, places: dict[nn.Parameter, int], ignored: Collection[nn.Parameter] = ()
) -> Found:
    """The operators in module order, parents before children. A module at several places is one operator.

    gathers: whether parameters are gathered from other ranks, which makes modules that choose their children leaves.
        The root becomes such a leaf only by a mark, not by the names of its children.
    places: the place of each parameter in `ModelSpec.weights`. New parameters are added with the next places.
    ignored: parameters outside of all operators.
    """
    found: Found = []
    seen: set[nn.Module] = set()  # membership only

    def visit(module: nn.Module, name: str, above: tuple[int, ...], is_chosen: bool) -> None:
        if module in seen:
            return
        seen.add(module)
        # The hooks of a compiled module stand around it, so it answers for all modules inside.
        compiled = is_compiled(module)
        inside = [each for each in module.modules() if each is not root] if compiled else []
        # A leaf needs all of its chunks on the device at once, so the name of a child is not enough to make the root
        # one. A compiled module has no operators inside, so it routes if anything in it does.
        is_router = (chooses(module) and (module is not root or is_marked(module))) or any(map(chooses, inside))
        # Data also decides about everything inside a router. Where nothing is gathered, ranks may differ freely, and
        # the modules inside stay operators of their own.
        is_chosen = is_chosen or is_router
        routes = gathers and is_router
        is_leaf = routes or compiled or isinstance(module, _LEAVES)
        # Parameters of other modules that the user has registered with this one are fetched with its own.
        external = [parameter for each in (module, *inside) for parameter in external_parameters(each)]
        parameters = [each for each in (*module.parameters(recurse=is_leaf), *external) if each not in ignored]
        if parameters:
            spec = OperatorSpec(
                name,
                tuple(places.setdefault(parameter, len(places)) for parameter in parameters),
                above,
                is_chosen,
                edits_weights=getattr(module, "max_norm", None) is not None,  # embeddings that renormalise rows
                routes=routes,
                is_compiled=compiled,
            )
            found.append((module, spec))
            above = (*above, len(found) - 1)
        # Modules inside a leaf get no hooks: a fetch there would be a collective that other ranks may not reach, or
        # would be traced by the compiler.
        if is_leaf:
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, above, is_chosen)

    visit(root, "", (), False)
    return found


def parameter_places(root: nn.Module) -> list[tuple[str, int]]:
    """(name in its module, id) of all parameters. The list changes if a parameter is added, replaced or renamed.

    It takes a fraction of the time of `named_parameters()`, which composes every full name. Ids are compared on this
    rank only.
    """
    found: list[tuple[str, int]] = []
    stack, seen = [root], {id(root)}
    while stack:
        module = stack.pop()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                # The chunks keep wrapped parameters alive, so the id of one is never that of a parameter which replaced
                # it.
                found.append((name, id(parameter)))
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)
    return found
