"""`state_hash`: one hash of all training state, to compare runs bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """SHA-256, in hexadecimal, of all parameters and buffers, and of the optimizer's state if one is given.

    A `ShardedModel` on any number of ranks has the hash of the plain module with the same bits, so two runs can be
    compared by one line of their logs. Collective for a sharded model.

    Args:
        model: a `ShardedModel` or a plain module.
        optimizer: its states and fp32 masters are part of the hash, its hyperparameters are not.

    Raises what `state_dict()` of the two raises, such as GeminiError inside a forward.

    Example:
        >>> plain = state_hash(module)
        >>> state_hash(ShardedModel(module)) == plain
        True
    """
    digest = hashlib.sha256()
    _add(digest, "model", model.state_dict())
    if optimizer is not None:
        saved = optimizer.state_dict()
        _add(digest, "state", saved["state"])
        masters = saved.get("masters")
        if masters:
            _add(digest, "masters", masters)
    return digest.hexdigest()


def _add(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        # Keys are sorted, because the hash must not depend on the order in which entries were added.
        for key in sorted(value, key=str):
            _add(digest, f"{name}.{key}", value[key])
        return
    digest.update(name.encode())
    if isinstance(value, Tensor):
        # Dtype and shape are hashed too: tensors with equal bytes may still differ.
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        # numpy has no bfloat16, so the elements are taken as bytes.
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    else:
        digest.update(repr(value).encode())
