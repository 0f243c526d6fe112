"""The updates of one model by several optimizers, or by one of whole tensors: each param group has a rule of its own.

`ShardedOptimizer(model, [Muon(matrices), HybridAdam(rest)])` has one list of param groups, in which each group says by
`group["optimizer"]` whose it is. Everything before the update is of all of them together: the norm, the clip, the loss
scale, whether a step is skipped. Then each run of a chunk is updated by the rule of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from gemini.optimizer.elementwise import AdamUpdate, ElementwiseUpdate, resolve_update
from gemini.optimizer.given import kind_of
from gemini.optimizer.shards import EntryNames, GradientFactors, RunUpdate
from gemini.optimizer.whole_tensor import OwnedTensor, WholeTensorUpdate, is_per_tensor
from optim import StateFormat

WHOSE = "optimizer"
"""The key by which a param group says which of several optimizers it is of."""

Rule = ElementwiseUpdate | WholeTensorUpdate
UpdateRule: TypeAlias = "ElementwiseUpdate | SeveralUpdates"


def resolve_rules(optimizers: Sequence[torch.optim.Optimizer], elementwise: bool) -> UpdateRule:
    """What updates the parameters of the user's optimizers. Local.

    Raises UnsupportedError for one that is known to treat neither each element nor each tensor by itself.
    elementwise: the user says that those which are not known are elementwise.
    """
    rules: list[Rule] = [
        WholeTensorUpdate(each) if is_per_tensor(each) else resolve_update(each, elementwise) for each in optimizers
    ]
    if len(rules) == 1 and not isinstance(rules[0], WholeTensorUpdate):
        return rules[0]
    return SeveralUpdates(dict(zip(names_of(optimizers), rules, strict=True)))


def names_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """A name for each optimizer: that of its class, with a number from the second of one class on."""
    found: list[str] = []
    for each in optimizers:
        name = kind_of(each).__name__
        number = sum(other.split(" ")[0] == name for other in found) + 1
        found.append(name if number == 1 else f"{name} {number}")
    return found


def label_groups(names: Sequence[str], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Write into the param groups of several optimizers whose they are."""
    for name, optimizer in zip(names, optimizers, strict=True) if len(names) > 1 else ():
        for group in optimizer.param_groups:
            group[WHOSE] = name


def refuse_shared_parameters(names: Sequence[str], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ValueError if two optimizers have one parameter."""
    owner: dict[int, str] = {}
    for name, optimizer in zip(names, optimizers, strict=True):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                before = owner.setdefault(id(parameter), name)
                if before != name:
                    raise ValueError(
                        f"{before} and {name} both have a parameter of shape {tuple(parameter.shape)}: each parameter "
                        "has one optimizer"
                    )


class SeveralUpdates:
    """Updates runs by the rules of their param groups. With one rule, groups say nothing."""

    is_fused = False

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        """rules: by the name of their optimizer."""
        self._rules = dict(rules)
        # No parameter has states of two optimizers, so they may lie in one memory: Muon's momentum of matrices where
        # Adam's first moments of the vectors beside them do. What an optimizer keeps must not change with its settings:
        # a state that came later might find another one of its parameter in its place.
        always = sorted((rule.always_has or () for rule in rules.values()), key=len, reverse=True)
        is_known = all(rule.always_has is not None for rule in rules.values())
        self.memory_of = {name: first for its in always for name, first in zip(its, always[0])} if is_known else {}

    def of(self, group: Mapping[str, Any]) -> Rule:
        """The rule of a param group. Raises ValueError if the group does not say whose it is."""
        if len(self._rules) == 1:
            return next(iter(self._rules.values()))
        name = group.get(WHOSE)
        if name not in self._rules:
            raise ValueError(
                f"a param group of several optimizers says by {WHOSE!r} whose it is, one of {', '.join(self._rules)}: "
                f"found {name!r}"
            )
        return self._rules[name]

    @property
    def steps_whole(self) -> bool:
        """Whether any of the rules takes whole tensors."""
        return any(isinstance(rule, WholeTensorUpdate) for rule in self._rules.values())

    def format_of(self, group: Mapping[str, Any], numel: int = 2**62, is_embedding: bool = False) -> StateFormat:
        """See `AdamUpdate.format_of`."""
        return self.of(group).format_of(group, numel, is_embedding)

    def flat_names(self, group: Mapping[str, Any], shape: Sequence[int] = ()) -> tuple[str, ...]:
        """The per-element states of a parameter of this param group and shape."""
        return self.of(group).flat_names(group, shape)

    def entry_names(self, group: Mapping[str, Any], shape: Sequence[int] = ()) -> EntryNames:
        """See `AdamUpdate.entry_names`."""
        return self.of(group).entry_names(group, shape)

    def temporary_bytes(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        """See `AdamUpdate.temporary_bytes`."""
        return max(rule.temporary_bytes(numel, dtype, device) for rule in self._rules.values())

    def update(
        self, updates: Sequence[RunUpdate], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        """Update the runs of one chunk. See `AdamUpdate.update`."""
        # Our Adam comes first. It updates weights where they lie, and all others a copy of the whole chunk where a
        # master is split, which is written back over everything: the copy must be made of Adam's new weights.
        for rule in sorted(self._rules.values(), key=lambda each: not each.is_fused):
            its = [each for each in updates if self.of(groups[each.run.group]) is rule]
            if its:
                rule.update(its, groups, factors)

    def step(self, tensors: Sequence[OwnedTensor], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Step whole tensors by the optimizers of their groups. Returns the entry of each."""
        found: list[dict[str, Any]] = [{} for _ in tensors]
        for rule in self._rules.values():
            its = [number for number, each in enumerate(tensors) if self.of(groups[each.group]) is rule]
            if its and isinstance(rule, WholeTensorUpdate):
                for number, entry in zip(its, rule.step([tensors[each] for each in its], groups), strict=True):
                    found[number] = entry
        return found


class GroupRules:
    """What a chunk's state has to know of the rules of its parameters' groups."""

    def __init__(self, update: SeveralUpdates, groups: list[dict[str, Any]]) -> None:
        """groups: the list in force, which edits write in place."""
        self._update = update
        self._groups = groups

    def is_whole(self, group: int | None) -> bool:
        """Whether parameters of this group are updated whole, and so one by one."""
        return group is not None and isinstance(self._update.of(self._groups[group]), WholeTensorUpdate)

    def counts_steps(self, group: int | None) -> bool:
        """Whether the step count of a parameter of this group is a plain number, and its states are always there."""
        return group is not None and isinstance(self._update.of(self._groups[group]), AdamUpdate)

    def memory_of(self, name: str) -> str:
        """The name of the memory that a flat state lies in: states that no parameter has both may share one."""
        return self._update.memory_of.get(name, name)

    def whose(self, group: int) -> str | None:
        """The name of the optimizer that a group is of; None if there is one only."""
        return self._groups[group].get(WHOSE)

    def names(self, group: int | None) -> tuple[str, ...] | None:
        """The states that parameters of this group always have. None: those that updates have made."""
        if group is None or not self.counts_steps(group):
            return None
        return self._update.flat_names(self._groups[group])
