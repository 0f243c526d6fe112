"""The update of a run of elements: by our Adam, or by a torch optimizer that works element by element.

A run is a piece of a flat shard whose parameters share group, step count and scalars. An elementwise optimizer gives
the same bits on a run as on its parameters one by one, so one call updates hundreds of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gemini.errors import UnsupportedError
from gemini.optimizer.runs import EntryNames, GradientFactors, RunUpdate
from gemini.optimizer.torch_update import TESTED, TorchUpdate
from optim import AdamPiece, AdamScalars, CPUAdam, HybridAdam, adam_scalars, hyperparameters, update_pieces


class AdamUpdate:
    """The Adam of `optim.reference`, over any number of chunks at once."""

    is_fused = True  # one call takes runs with spans, of several chunks; step counts are plain numbers

    def flat_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The per-element states of a parameter of this param group."""
        return ("exp_avg", "exp_avg_sq")

    def entry_names(self, group: Mapping[str, Any]) -> EntryNames:
        """The keys of a state dict's entry for a parameter of this param group that was stepped."""
        flat = self.flat_names(group)
        return EntryNames(("step", *flat), flat, ("step", *flat))

    def temporary_bytes(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        """The most bytes that an update of `numel` elements has on the device at once besides its arguments."""
        # The kernels update in place. Plain torch operations, the fallback on CUDA without Triton, take temporaries
        # that are not counted here.
        return 0

    def update(
        self, updates: Sequence[RunUpdate], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        """Update the runs' weights, states and scalars: one launch for all that have the same constants.

        Raises ValueError for a hyperparameter of `groups` that is not valid, and UnsupportedError for fp64 weights.
        """
        constants: dict[tuple[int, int], AdamScalars] = {}  # by step and param group
        pieces: dict[AdamScalars, list[AdamPiece]] = {}
        for each in updates:
            if each.grad.dtype is torch.float64:
                raise UnsupportedError("HybridAdam updates fp32 weights; this model has fp64 ones: use AdamW")
            # Runs without elements count their steps as well: their parameters are in other ranks' shards.
            step = each.count_step()
            key = step, each.run.group
            if key not in constants:
                settings = hyperparameters(groups[each.run.group])
                constants[key] = adam_scalars(step=step, **factors._asdict(), **settings)
            if each.weights is not None:
                moments = each.flat["exp_avg"], each.flat["exp_avg_sq"]
                its = (
                    part.piece(each.run.start, each.grad, *moments, each.run.spans) for part in each.weights.segments()
                )
                # Pieces are collected by constants and not by group, so that groups with equal hyperparameters share a
                # launch.
                pieces.setdefault(constants[key], []).extend(piece for piece in its if piece is not None)
        for scalars, alike in pieces.items():
            update_pieces(alike, scalars)


ElementwiseUpdate = AdamUpdate | TorchUpdate


def resolve_update(optimizer: torch.optim.Optimizer, elementwise: bool) -> ElementwiseUpdate:
    """The update of the user's optimizer. Raises UnsupportedError if it is not known to be elementwise.

    elementwise: the user says that it is. Raises TypeError for anything but True and False.
    """
    if not isinstance(elementwise, bool):
        raise TypeError(f"elementwise must be True or False, found {elementwise!r}")
    # The exact type counts: a subclass may update in another way, of which nothing is known.
    if type(optimizer) in (HybridAdam, CPUAdam):
        return AdamUpdate()
    if type(optimizer) in TESTED or elementwise:
        return TorchUpdate(optimizer)
    names = ", ".join(["HybridAdam", "CPUAdam", *(kind.__name__ for kind in TESTED)])
    raise UnsupportedError(
        f"{type(optimizer).__name__} is not known to work element by element, which chunks need. Known: {names}. If "
        "yours does, say elementwise=True"
    )
