"""Which kernel gets which pieces."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from optim import AdamPiece, adam_scalars, dispatch, update_pieces


def test_every_device_has_a_launch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain model may be split over several GPUs, and a kernel runs on one."""
    triton_adam = pytest.importorskip("optim.triton_adam", reason="needs triton")
    launched: list[list[str]] = []

    def launch(pieces: Sequence[AdamPiece], *_: Any) -> None:
        launched.append([str(piece.weight.device) for piece in pieces])

    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(triton_adam, "_launch", launch)
    with FakeTensorMode():
        pieces = [AdamPiece(*(torch.zeros(3, device=f"cuda:{i % 2}") for _ in range(4))) for i in range(3)]
        update_pieces(pieces, adam_scalars(step=1, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0))
    assert launched == [["cuda:0", "cuda:0"], ["cuda:1"]]
