"""The choice of kernels: the CPU extension, Triton, or plain torch operations. All give the same bits."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from optim import cpu_adam, cpu_norm, norm, reference
from optim.cpu_extension import warn_missing
from optim.master import absorb_edits_
from optim.piece import AdamPiece, AdamScalars


def update_pieces(pieces: Sequence[AdamPiece], scalars: AdamScalars, absorbs: bool = False) -> None:
    """One update of checked pieces with the same scalars, by the fastest kernel for each device.

    absorbs: masters take over elements of their 16-bit weights that were written to since the last update, see
        `absorb_edits_`. On a GPU the same launch does it: operations of torch's would take several passes over all
        weights, for each parameter by itself.
    """
    by_device: dict[torch.device, list[AdamPiece]] = {}
    for piece in pieces:
        by_device.setdefault(piece.weight.device, []).append(piece)
    # Only kernels need `_note_writes`: the reference's operations work on detached views and raise the version counters
    # that these share with the tensors.
    for device, group in by_device.items():
        is_triton = device.type == "cuda" and has_triton()
        if absorbs and not is_triton:
            for piece in group:
                if piece.half is not None:
                    absorb_edits_(piece.weight, piece.half)
        if device.type == "cpu" and cpu_adam.is_available():
            cpu_adam.update(group, scalars)
            _note_writes(group)
        elif is_triton:
            # Imported here: it imports Triton, which torch's CPU builds do not bring along.
            from optim import triton_adam

            triton_adam.update(group, scalars, absorbs)
            _note_writes(group)
        else:
            if device.type == "cpu":
                warn_missing()
            reference.update(group, scalars)


@cache
def has_triton() -> bool:
    """Whether Triton, which torch's CUDA builds include, can compile and launch. Tried once; warns if it cannot."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        _launch_once()
    except Exception as error:  # whatever a compiler, or its absence, raises
        warnings.warn(
            f"Triton is installed but cannot launch a kernel ({type(error).__name__}: {error}): updates on the GPU use "
            "torch operations, with the same bits and several times slower. Triton needs a C compiler (gcc) on PATH",
            stacklevel=2,
        )
        return False
    return True


def prepare(device: torch.device) -> None:
    """Find out which kernels work on `device`, and make what they keep: no step allocates it, or waits for it."""
    if device.type == "cuda":
        has_triton()
    if cpu_adam.is_available():
        cpu_adam.prepare()


def _launch_once() -> None:
    from optim import triton_norm

    device = torch.device("cuda", torch.cuda.current_device())
    triton_norm.accumulate_sum_of_squares_(norm.zero_norm_limbs(device), torch.ones(norm.TILE, device=device))


def _note_writes(pieces: Sequence[AdamPiece]) -> None:
    """Raise the version counters of written tensors, because autograd does not see the writes of a kernel.

    Without it a backward through a graph from before the update would use updated values without an error.
    """
    written = [tensor for weight, _, *others in pieces for tensor in (weight, *others) if isinstance(tensor, Tensor)]
    # Inference tensors have no version counter.
    torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])


def accumulate_sum_of_squares_(limbs: norm.NormLimbs, flat: Tensor) -> Tensor:
    """Add the squares of `flat` to `limbs`. `flat` is 1-D, fp64, fp32, bf16 or fp16, and starts at a tile border.

    Returns the index of the first non-finite element, -1 if there is none: int64, 0-dim. On a device the host waits for
    it only when the caller reads it. Tiles with such elements are counted in the last two limbs and not added. Finite
    fp64 elements whose squares the limbs cannot hold are counted as infinite, see `optim.norm.FP64_SUMS`.
    """
    norm.check(limbs, flat)
    # The kernels know no fp64: fp64 gradients take the plain operations on every device.
    if limbs.device.type == "cpu" and cpu_norm.can_sum(flat):
        return cpu_norm.accumulate_sum_of_squares_(limbs, flat)
    if flat.device.type == limbs.device.type == "cuda" and flat.dtype is not torch.float64 and has_triton():
        from optim import triton_norm

        return triton_norm.accumulate_sum_of_squares_(limbs, flat)
    return norm.accumulate_sum_of_squares_(limbs, flat)
