"""Updates that are given to the kernels together: one launch for all chunks whose elements have the same scalars."""

from __future__ import annotations

from collections.abc import Sequence

from optim import AdamPiece, AdamScalars, update_pieces


class Launches:
    """Pieces that wait for their update, by scalars."""

    def __init__(self) -> None:
        self._waiting: dict[AdamScalars, list[AdamPiece]] = {}

    def add(self, pieces: Sequence[AdamPiece], scalars: AdamScalars) -> None:
        """Pieces whose tensors stay as they are until `run`. Raises ValueError for what is no piece."""
        for piece in pieces:
            piece.check()
        self._waiting.setdefault(scalars, []).extend(pieces)

    def run(self) -> None:
        """Update all that waits."""
        waiting, self._waiting = self._waiting, {}
        for scalars, pieces in waiting.items():
            update_pieces(pieces, scalars)
