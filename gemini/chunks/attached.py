"""Attached gradients: the `.grad` of a chunk's parameters are views of its gradient home, where autograd adds to them.

[Note: Attached gradients] Autograd leaves a parameter's first gradient in `.grad` as it is, and adds later ones to it.
On a CPU, an addition by autograd takes less time than a copy of a small gradient from there to the home. So where one
rank accumulates in the home, `.grad` is a view of it, also between steps. The home is then *blank* where a step has no
gradient yet: negative zeros, since x + -0.0 has the bits of every x, while 0.0 + -0.0 is 0.0. On a GPU each addition
would be a launch of its own, where one launch copies all gradients that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor, nn

from gemini.chunks.chunk import Chunk
from gemini.chunks.own_grad import set_grads
from gemini.memory.region import Region
from gemini.memory.transfer import ready

BLANK = -0.0
_DTYPES = {torch.float32, torch.float64}
"""Of several micro-batches, 16-bit gradients are added in fp32. A complex zero cannot be filled with both signs."""


class Attached:
    """One chunk's parameters, whose `.grad` are views of the home."""

    def __init__(self, parameters: Sequence[nn.Parameter], home: Region, views: Sequence[Tensor]) -> None:
        """home: of whole payloads, on the CPU. views: of it, by parameter."""
        self._parameters = parameters
        self._home = home
        self._views = views
        self._is_blank = False
        # False while some `.grad` are views and others are not, as an interrupt may leave them. Gradients are then
        # taken over as if nothing were attached: a gradient that is in the home already is copied to itself.
        self.is_complete = False

    def attach_all(self) -> None:
        """Make the home blank, and every `.grad` a view of it. Local."""
        # While the attachment is incomplete, gradients are copied into the home, of which `_is_blank` knows nothing.
        if not (self._is_blank and self.is_complete):
            ready(self._home).fill_(BLANK)
            self._is_blank = True
        if not self.is_complete:
            set_grads(self._parameters, self._views)
            self.is_complete = True

    def note_gradients(self) -> None:
        """Autograd has added to the home."""
        self._is_blank = False

    def detach_all(self) -> None:
        """Set every `.grad` to None. What was added stays in the home. Local."""
        self.is_complete = False
        set_grads(self._parameters, repeat(None))


def may_attach(chunk: Chunk, home: Region) -> bool:
    """Whether gradients of the chunk, which one rank accumulates in `home`, may be attached."""
    return chunk.is_fine and chunk.dtype in _DTYPES and home.flat.device.type == "cpu"
