"""Param groups of parameters in chunks: their members, and groups that are added later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.access.link import link_of
from gemini.chunks.chunk import ManagedParameter
from gemini.errors import UnsupportedError
from gemini.manager.step import Step
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.in_words import group_in_words


def managed_of(step: Step, parameter: object) -> ManagedParameter | None:
    """The managed parameter of this model that belongs to `parameter`. None if it is not a parameter of the model."""
    link = link_of(parameter) if isinstance(parameter, Tensor) else None
    # A parameter of another `ShardedModel` has a link, too, to the step of that model.
    return link.managed if link is not None and link.step is step else None


def members_of(step: Step, owner: str, number: int, group: dict[str, Any]) -> list[ManagedParameter]:
    """The parameters of a param group of `owner`.

    Raises ValueError if one is not this model's, or there twice, and UnsupportedError for one that is complex.
    """
    members: dict[int, ManagedParameter] = {}
    for parameter in group["params"]:
        managed = managed_of(step, parameter)
        if managed is None:
            raise ValueError(
                f"param group {number} of {owner} has a parameter of shape {tuple(parameter.shape)} that is not this "
                "model's: take model.parameters() of the wrapped model, without those of ignored_parameters=, which "
                "an optimizer of their own trains"
            )
        # A frozen complex parameter is never updated. `model.parameters()` may bring it into a group.
        if managed.dtype.is_complex and parameter.requires_grad:
            raise UnsupportedError(
                f"{managed.name!r} is {managed.dtype}, and updates are of real numbers. Keep it as a real parameter of "
                "two numbers each, for torch.view_as_complex() in forward; or name it in ignored_parameters= and train "
                "it with an optimizer of its own"
            )
        if managed.index in members:
            raise ValueError(f"param group {number} of {owner} has {managed.name!r} twice")
        members[managed.index] = managed
    return list(members.values())


def agreed_groups(step: Step, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The param group of each member of one of `optimizer`, by parameter index, the same on all ranks. Collective.

    Each rank updates a part of every parameter: with another learning rate than other ranks use for theirs, if it had
    the parameter in another group. Raises DivergenceError then, and what `members_of` raises.
    """
    owner, groups = type(optimizer).__name__, optimizer.param_groups
    members = [members_of(step, owner, number, group) for number, group in enumerate(groups)]
    words = [
        group_in_words(number, its, group) for number, (its, group) in enumerate(zip(members, groups, strict=True))
    ]
    remedy = "All ranks must make the same optimizer, with the same parameters in the same order"
    step.communicator.agree("\n".join([owner, *words]).encode(), "choice of optimizer", remedy=remedy)
    return {managed.index: number for number, its in enumerate(members) for managed in its}


def add_group(model: ShardedModel, states: ChunkStates, groups: Sequence[dict[str, Any]]) -> None:
    """Allocate the state of the members of the last group, which is new, in a plan that counts it. Collective.

    Raises ValueError for members that are not allowed, BudgetError if there is no room for the state, and
    DivergenceError if ranks add different groups; nothing has changed then.
    """
    step, number, group = model.chunk_manager.step, len(groups) - 1, groups[-1]
    members = members_of(step, "ShardedOptimizer", number, group)
    states.check_group(group)  # before any memory is allocated
    words = group_in_words(number, members, group)
    remedy = "All ranks must add the same param group at the same step"
    with states.adding_group(number, members):
        # Compared inside the block, so that a group in which ranks differ is undone on all of them.
        step.communicator.agree(words.encode(), "new param group", remedy=remedy)
        # The plan follows before the state takes memory: what it does not count would rest on the host of a model with
        # a device budget.
        model.trainability.follow_optimizer(f"new param group of {len(members)} parameters")
        states.allocate_all()
