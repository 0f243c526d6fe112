"""A copy of the user's optimizer, whose `step()` is given tensors of ours.

It is a copy of the object and not another one of its class, whose constructor may take what is in no group. It has the
optimizer's attributes, as a script sets them between steps. What a step changes of these, or of a param group, such as
a count of steps, would be lost, or be counted once for each part of a model: such an optimizer is refused by name, when
a trial step shows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from gemini.errors import UnsupportedError
from gemini.optimizer.given import GivenOptimizer, kind_of

_OURS = {"state", "param_groups", "defaults", *GivenOptimizer.__annotations__}


class Worker:
    """Holds the copy, `optimizer`, which has no state and no groups between steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind = kind = kind_of(optimizer)
        self._given = ref(optimizer)
        self.optimizer: torch.optim.Optimizer = object.__new__(kind)
        fields = _own_fields(optimizer)
        hooks = {name: type(value)() for name, value in vars(optimizer).items() if name.endswith("_hooks")}
        others = {"defaults": dict(optimizer.defaults), "param_groups": [], "state": defaultdict(dict)}
        vars(self.optimizer).update({**fields, **hooks, **others})

    def step(self) -> None:
        """Step the copy's param groups, with the attributes that the user's optimizer has by now."""
        given = self._given()
        if given is not None:
            vars(self.optimizer).update(_own_fields(given))
        self.optimizer.step()

    def trial_step(self) -> None:
        """`step`, of what nobody needs. Raises UnsupportedError if it keeps something outside of `state`."""
        worker = self.optimizer
        fields, groups = _own_fields(worker), [dict(group) for group in worker.param_groups]
        before = {name: _mark(value) for name, value in fields.items()}
        self.step()
        # An attribute that the step makes, and that is no number and no tensor, such as a flag of a warning, is let be.
        self._refuse_changed("its attribute", fields, before, _own_fields(worker))
        for was, group in zip(groups, worker.param_groups, strict=True):
            marks = {name: _mark(value) for name, value in was.items()}
            self._refuse_changed("in a param group", was, marks, group)

    def _refuse_changed(
        self, what: str, had: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> None:
        for name, value in now.items():
            is_new = name not in had
            if name == "params" or (
                is_new and (isinstance(value, bool) or not isinstance(value, (int, float, Tensor)))
            ):
                continue
            if is_new or _mark(value) != before[name]:
                raise UnsupportedError(
                    f"{self.kind.__name__}.step() changes {what} {name!r}. It is called for parts of a model, on ranks "
                    "that have different ones, so what it remembers must be in self.state[parameter]: keep it there"
                )


def _own_fields(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that a step may read: without groups, states and the script's hooks."""
    found = {name: value for name, value in vars(optimizer).items() if name not in _OURS}
    # A scheduler may have put its wrapper of the method there.
    return {name: value for name, value in found.items() if name != "step" and not name.endswith("_hooks")}


def _mark(value: Any) -> Any:
    """What is equal as long as nothing has changed `value`, which is kept meanwhile."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, Mapping):
        return [(key, _mark(its)) for key, its in value.items()]
    if isinstance(value, (list, tuple)):
        return [_mark(its) for its in value]
    return value if isinstance(value, (bool, int, float, complex, str, bytes, type(None))) else id(value)
