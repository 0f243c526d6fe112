"""The optimizer that a script made and gave to `ShardedOptimizer`: its hooks are taken over, its methods act on that.

A script may go on to use the optimizer that it has made: it registers hooks on it, asks it for a state dict, or steps
it. Its own methods would find no state and no gradient, and change nothing. So it becomes of a class of ours, derived
from its own, whose methods call those of the `ShardedOptimizer`. Both have the same param groups and the same hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from operator import is_
from typing import Any, cast
from weakref import ReferenceType, ref

from torch.optim import Optimizer

from gemini.errors import GeminiError, UnsupportedError

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(eq=False)
class ShownGroups:
    """The `param_groups` of an optimizer, which a script may edit or replace. A step finds that, and follows."""

    groups: list[dict[str, Any]] = field(default_factory=list)

    def show(self, groups: list[dict[str, Any]]) -> None:
        """`optimizer.param_groups = groups`."""
        self.groups = groups


class GroupEdits:
    """Whether the script has edited the param groups since they came in force, or their members. Local."""

    def __init__(self, shown: ShownGroups, in_force: list[dict[str, Any]]) -> None:
        """in_force: the list that a step reads."""
        self._shown = shown
        self._in_force = in_force
        self.note_followed()

    def note_followed(self) -> None:
        """The shown groups are in force now."""
        self._members = self._members_now()

    def are_any(self) -> bool:
        """Whether they differ by identity, which is compared in C: a model may have thousands of parameters."""
        shown, in_force = self._shown.groups, self._in_force
        if len(shown) != len(in_force) or not all(map(is_, shown, in_force)):
            return True
        return any(
            len(its) != len(before) or not all(map(is_, its, before))
            for its, before in zip(self._members_now(), self._members, strict=True)
        )

    def _members_now(self) -> list[list[Any]]:
        # With what decides how their moments are stored, which is settled once they are, and which of several
        # optimizers updates them (`several.WHOSE`).
        return [[*group["params"], group.get("optim_bits"), group.get("optimizer")] for group in self._shown.groups]


class GivenOptimizer:
    """What an optimizer is once a `ShardedOptimizer` was made of it. Its methods are collective as those are."""

    _sharded: ReferenceType[Any]  # the `ShardedOptimizer`, which may be gone
    _shown: ShownGroups  # its groups
    _state_view: Any  # its states
    _is_one_of: int  # how many optimizers the `ShardedOptimizer` was made of

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the `ShardedOptimizer`."""
        return self._shown.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_one_of > 1:  # these are a part of those that a step follows
            self._alone("setting param_groups")
        self._shown.show(groups)

    def take_for(self, sharded: Optimizer, is_one_of: int, groups: list[dict[str, Any]]) -> None:
        """From now on the methods act on `sharded`, whose state and groups are shown.

        is_one_of: how many optimizers `sharded` was made of. groups: those of this one, which alone it shows if there
        are several: a scheduler of it drives no other's.
        """
        self._sharded, self._is_one_of = ref(sharded), is_one_of
        # One for both, so that a scheduler of this one sees groups that are added later.
        self._shown = cast(Any, sharded).shown_groups if is_one_of == 1 else ShownGroups(groups)
        self._state_view = sharded.state
        # A scheduler may have put its wrapper of the plain method there.
        vars(self).pop("step", None)

    @property
    def state(self) -> Any:
        """Those of the `ShardedOptimizer`."""
        return self._state_view

    @state.setter
    def state(self, states: Any) -> None:
        self._state_view.replace(states)

    @property
    def is_taken(self) -> bool:
        """Whether a `ShardedOptimizer` that is not closed was made of it."""
        sharded = self._sharded()
        return sharded is not None and not sharded.is_closed

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`ShardedOptimizer.step`."""
        return self._alone("step()").step(closure)

    # Schedulers of torch wrap the `step` that they find, to know whether it was called. Wrapped once more, it would be
    # the plain optimizer's again.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`ShardedOptimizer.zero_grad`."""
        self._its("zero_grad()").zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """`ShardedOptimizer.state_dict`."""
        return cast(dict[str, Any], self._alone("state_dict()").state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """`ShardedOptimizer.load_state_dict`."""
        self._alone("load_state_dict()").load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`ShardedOptimizer.add_param_group`."""
        self._alone("add_param_group()").add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"a {type(self).__name__} that a ShardedOptimizer was made of cannot be pickled or copied: its state is "
            "in there; use state_dict()"
        )

    def _alone(self, what: str) -> Any:
        if self._is_one_of > 1:
            raise UnsupportedError(
                f"{what} of a {type(self).__name__} that is one of {self._is_one_of} optimizers of one "
                "ShardedOptimizer: call it there, for all of them"
            )
        return self._its(what)

    def _its(self, what: str) -> Any:
        sharded = self._sharded()
        if sharded is None or sharded.is_closed:
            raise GeminiError(
                f"{what} of a {type(self).__name__} whose ShardedOptimizer was closed, or dropped by the script: keep "
                "that one, and call it there"
            )
        return sharded


@cache
def _given(kind: Hashable) -> type[Optimizer]:
    """`kind` with the methods of `GivenOptimizer`, and its name: schedulers and logs ask for it."""
    assert isinstance(kind, type)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return cast(type[Optimizer], type(kind.__name__, (GivenOptimizer, kind), names))


def kind_of(optimizer: Optimizer) -> type[Optimizer]:
    """The class of which the script made the optimizer."""
    kind = type(optimizer)
    return cast(type[Optimizer], kind.__bases__[1]) if issubclass(kind, GivenOptimizer) else kind


def refuse_taken(optimizer: Optimizer) -> None:
    """Raises UnsupportedError for an optimizer of which another `ShardedOptimizer` was made."""
    if isinstance(optimizer, GivenOptimizer) and optimizer.is_taken:
        raise UnsupportedError(
            f"a ShardedOptimizer was made of this {type(optimizer).__name__} already: make another one of "
            "model.parameters()"
        )


def drop_states(optimizer: Optimizer) -> None:
    """Free states of a plain optimizer. Adagrad creates whole ones in its constructor. Local."""
    # One that was given before shows those of its closed `ShardedOptimizer`, which are freed.
    if not isinstance(optimizer, GivenOptimizer):
        optimizer.state.clear()


def take_over(optimizer: Optimizer, sharded: Optimizer, is_one_of: int = 1) -> None:
    """Let `sharded` run the hooks of `optimizer`, and the methods of `optimizer` act on `sharded`. Local.

    is_one_of: how many optimizers `sharded` is made of.
    """
    groups = [*optimizer.param_groups]
    for name in _HOOKS:
        # The dicts themselves: the script may have handles to remove a hook from them.
        if is_one_of == 1:
            setattr(sharded, name, getattr(optimizer, name))
        else:
            getattr(sharded, name).update(getattr(optimizer, name))
    optimizer.__class__ = _given(cast(Hashable, kind_of(optimizer)))
    cast(Any, optimizer).take_for(sharded, is_one_of, groups)
