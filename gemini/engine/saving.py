"""Saves whole weights as one file, atomically: the file is complete or does not exist."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from gemini.model.sharded_model import ShardedModel


def save_weights(model: ShardedModel, path: Path) -> None:
    """Write `model.state_dict()` on rank 0. Collective, between steps.

    path: the file, in the safetensors format if it ends in .safetensors, else in torch's. Its folder is created. Raises
    OSError on rank 0 and RemoteRankError on the others if it cannot be written; an existing file is unchanged then.
    """
    communicator = model.chunk_manager.communicator
    # Every rank takes part, as parameters may have to be gathered. Only rank 0 keeps the result, in host memory.
    state = model.state_dict(rank0_only=True)
    with communicator.publishing():
        if communicator.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            # It lies beside the file, since `os.replace` is atomic inside one file system only.
            partial = path.with_name(f"{path.name}.partial")
            try:
                if path.suffix == ".safetensors":
                    # safetensors refuses tensors that share memory, as tied weights do, or that are not contiguous.
                    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, partial)
                else:
                    torch.save(state, partial)
                os.replace(partial, path)
            finally:
                # After a success it has become the file. After a failure, such as a full disk, it would take space for
                # nothing.
                partial.unlink(missing_ok=True)
    # Another rank may read the file as soon as this function has returned there.
    communicator.wait_for_all("weights are saved")
