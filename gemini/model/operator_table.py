"""The operator table: a model's operators with their hooks, updated when modules are compiled.

A module may be compiled after it was wrapped, or stop being compiled. The table checks for that before every forward.
If it has happened, it finds the operators again and replaces the plan: a compiled module needs all of its chunks at
once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from gemini.access.trainability import Trainability
from gemini.errors import UnsupportedError
from gemini.manager.calls import Operator
from gemini.manager.chunk_manager import ChunkManager
from gemini.model.compiled import OuterCompiler, is_compiled
from gemini.model.hooks import Hooks
from gemini.model.operators import Found, find_operators
from gemini.placement.trace import Phase


class OperatorTable:
    """The operators of one model on this rank."""

    def __init__(
        self,
        root: nn.Module,
        found: Found,
        manager: ChunkManager,
        trainability: Trainability,
        hooks: Hooks,
        ignored: Collection[nn.Parameter],
    ) -> None:
        """found: the operators that the plan was made for. ignored: parameters outside of all operators."""
        self._ignored = ignored
        self._manager = manager
        self._step = manager.step
        self._trainability = trainability
        self._hooks = hooks
        self.compiler = OuterCompiler()
        # Numbers in the table of positions, which only grows: a module keeps its number while it is no operator.
        self._numbers = {module: place + 1 for place, (module, _) in enumerate(found)}
        self.operators: list[Operator] = []
        self._attach(root, found)

    def follow_compilation(self, root: nn.Module) -> None:
        """Update the operators if the set of compiled modules has changed. Collective then.

        Raises GeminiError between the micro-batches of a step, BudgetError if a compiled module's chunks do not fit
        together, DivergenceError if ranks differ; nothing has changed then.
        """
        step = self._step
        # An exception may have ended calls without our hooks. Find those, or they would count as running.
        if step.calls.by_thread:
            step.failures.find()
        # A nested call of the model, or a recomputation in backward, must see the operators that it began with.
        if step.calls.by_thread or step.is_recomputing():
            return
        # The user has called `torch.compile(model)`, or a compiled function that calls the model.
        if self.compiler.is_on and not is_compiled(root):
            self.compiler.compile(root)
            try:
                self._change(root)
            except BaseException:
                # The plan was refused, so the next call must not find the module compiled.
                root._compiled_call_impl = None
                raise
        # The user may have given the model another root, as with `model.module = torch.compile(model.module)`.
        elif root is not self._root or self._looks() != self._looked:
            # The fingerprint also changes with any new attribute or child. Only other compiled modules need another
            # plan.
            if root is not self._root or _compiled_modules(root.modules()) != self._compiled:
                self._change(root)
            else:
                self._look_at(root)

    def _change(self, root: nn.Module) -> None:
        """Find the operators again and replace the plan. Collective."""
        step, plan = self._step, self._manager.plan
        step.check_idle("compiling a module")
        # `check_idle` has set the position to a use of a parameter. Errors below name the forward that follows.
        step.position.set(0, Phase.FORWARD)
        by_name = {weight.name: place for place, weight in enumerate(plan.spec.weights)}
        managed = [each for chunk in step.chunks for each in chunk.parameters]
        # The plan's spec, and what follows from it, know weights by their places, so these stay.
        places = {each.parameter: by_name[each.name] for each in managed}
        found = find_operators(root, plan.settings.gathers(plan.world_size), places, self._ignored)
        # Places beyond the known weights were given to parameters that are in no chunk.
        for _, spec in found:
            if any(place >= len(by_name) for place in spec.weights):
                raise UnsupportedError(
                    f"{spec.name or 'the model'} was compiled or replaced and has parameters that were not in the "
                    "model when it was wrapped: change the module before ShardedModel(...)"
                )
        with step.publishing(), torch.inference_mode(False), torch.no_grad():
            # Ranks compare these words: all must have compiled the same modules.
            names = [spec.name or "the model" for _, spec in found if spec.is_compiled]
            shown = f"compiled: {', '.join(names) or 'nothing'}"
            self._trainability.change_operators(shown, tuple(spec for _, spec in found))
        self._attach(root, found)

    def _attach(self, root: nn.Module, found: Found) -> None:
        """Install hooks on the present operators, and remove all others."""
        # The plan in force was made for these operators, in this order.
        hooked = []
        for (module, spec), indices in zip(found, self._manager.plan.use_order, strict=True):
            if module not in self._numbers:
                self._numbers[module] = self._step.position.add(spec.name)
            chunks = tuple(self._step.chunks[index] for index in indices)
            operator = Operator(self._numbers[module], spec.name, chunks, spec.routes, spec.is_compiled)
            hooked.append((module, operator))
        self.operators = [operator for _, operator in hooked]
        self._hooks.attach(root, hooked)
        self._look_at(root)

    # -- the fingerprint

    def _look_at(self, root: nn.Module) -> None:
        """Record the module tree and its fingerprint."""
        self._root = root
        modules = list(root.modules())
        self._attributes = [module.__dict__ for module in modules]
        self._children = [module._modules for module in modules if module._modules]
        self._childless = [module._modules for module in modules if not module._modules]
        self._compiled = _compiled_modules(modules)
        # A module that gets one of these attributes later has more attributes, which the fingerprint counts.
        self._marked = [each for each in self._attributes if "_compiled_call_impl" in each or "forward" in each]
        self._looked = self._looks()

    def _looks(self) -> tuple[list[int], list[Any], list[Any], bool]:
        """A cheap fingerprint of the module tree, which changes when a module is compiled.

        `module.compile()` and `module.forward = ...` add or replace an attribute, and `torch.compile(child)` replaces
        or adds a child. The fingerprint has the number of attributes of each module, the children, these two
        attributes, and whether a module that had no child has one.
        """
        # This runs before every forward, so few modules are looked at one by one: `map` goes over kept lists of dicts,
        # and `any` finds an empty dict that was filled.
        children = list(chain.from_iterable(map(dict.values, self._children)))
        marks = [(each.get("_compiled_call_impl"), each.get("forward")) for each in self._marked]
        return list(map(len, self._attributes)), children, marks, any(self._childless)


def _compiled_modules(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """Those that are compiled, with their compiled calls, which may be replaced."""
    return [(module, module._compiled_call_impl) for module in modules if is_compiled(module)]
