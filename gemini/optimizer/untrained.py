"""Refuses, before a step changes anything, parameters that the user expects to be trained and that would not be."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gemini.chunks.chunk import ManagedParameter
from gemini.errors import GeminiError
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.param_groups import managed_of
from gemini.optimizer.summary import GradientSummary


def refuse_ungrouped(model: ShardedModel, states: ChunkStates) -> None:
    """Raises GeminiError if an unfrozen parameter is in no param group."""
    # Only parameters that were frozen before are looked at. Others in no group may have an optimizer of their own, as
    # in plain PyTorch.
    if not model.trainability.unfrozen:
        return
    unfrozen = [each for each in model.chunk_manager.parameters if each.index in model.trainability.unfrozen]
    names = [each.name for each in unfrozen if states.group(each) is None]
    if names:
        raise GeminiError(
            f"{', '.join(names)}: unfrozen, but in no param group of the optimizer, so nothing would train it. Call "
            'optimizer.add_param_group({"params": [...]}), or freeze it again'
        )


def refuse_idle(model: ShardedModel, summary: GradientSummary) -> None:
    """Raises GeminiError on all ranks if a trained parameter has no gradient, unless the settings ignore that."""
    if model.settings.ignore_unused_parameters:
        return
    # The managed flag is that of the last forward: a parameter that was frozen since then is not missed.
    trained = [each for each in model.chunk_manager.parameters if each.requires_grad and each.parameter.requires_grad]
    # A gradient on any rank counts: an expert that only another rank's batch has used is no idle parameter.
    names = [each.name for each in trained if not summary.has_gradient[each.index]]
    if names:
        raise GeminiError(
            f"no rank has a gradient of {', '.join(names)}: no loss since the last step depends on them. Freeze them, "
            "or wrap with ignore_unused_parameters=True"
        )


def frozen_among(model: ShardedModel, parameters: Iterable[Tensor] | None) -> list[ManagedParameter]:
    """The given frozen parameters, or all of the model. Raises ValueError if one is trained or not the model's."""
    if parameters is None:
        return [managed for managed in model.chunk_manager.parameters if not managed.requires_grad]
    # A tensor is iterable, so its rows would pass for parameters.
    if isinstance(parameters, Tensor):
        raise TypeError("discard_state() takes several parameters, found a tensor: put it into a list")
    found: dict[int, ManagedParameter] = {}
    for parameter in parameters:
        managed = managed_of(model.chunk_manager.step, parameter)
        if managed is None:
            raise ValueError(
                f"discard_state() takes parameters of the wrapped model, found {type(parameter).__name__} of shape "
                f"{tuple(getattr(parameter, 'shape', ()))}"
            )
        if managed.requires_grad:
            raise ValueError(f"discard_state() of {managed.name!r}, which is trained: freeze it first")
        found[managed.index] = managed
    return list(found.values())
