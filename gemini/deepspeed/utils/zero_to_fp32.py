"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights of a checkpoint, of ours or of DeepSpeed's, without its model."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from gemini.checkpoint.exporting import export_weights
from gemini.checkpoint.foreign import fp32_weights, import_checkpoint, is_ours
from gemini.placement.demand import parse_bytes

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """All weights and buffers, under each of their names, floating-point ones in fp32. Local.

    checkpoint_dir: of `Engine.save_checkpoint` or `save_checkpoint`, or of DeepSpeed's. tag: which; None: the newest.
    lazy_mode has no effect: the tensors are in memory. Raises CheckpointError and OSError.
    """
    return dict(fp32_weights(checkpoint_dir, tag, exclude_frozen_parameters))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write these weights into a folder. Local.

    safe_serialization: as safetensors files of at most `max_shard_size`, tensor by tensor. False: one
    `pytorch_model.bin`, for which all of them are in memory. The rest is as above. Raises CheckpointError and OSError.
    """
    out = Path(output_dir)
    out.mkdir(parents=True, exist_ok=True)
    if not safe_serialization:
        state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        torch.save(state, out / "pytorch_model.bin")
        return
    limit = parse_bytes(max_shard_size, "max_shard_size") if max_shard_size else None
    with tempfile.TemporaryDirectory(dir=out.parent) as beside:
        source, its = Path(checkpoint_dir), tag
        if not is_ours(source, tag):
            source, its = import_checkpoint(source / (tag or ""), beside), None
        export_weights(
            source, out, tag=its, dtype="fp32", max_file_bytes=limit or 2**63, only_trained=exclude_frozen_parameters
        )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load these weights into a plain module, on the CPU, which is returned. Local. Raises as above."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
