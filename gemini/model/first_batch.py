"""An upper bound of the non-model bytes of the first batch, before a step has measured them.

The bound is that of `gemini plan`, for the batch at hand: see `gemini/placement/workload.py` for its formulas. It
exists only if tokens can be counted and the formulas cover the model: token ids pass through an embedding into a list
of blocks with matrices. For any other model there is no bound, and the default fraction of the device is left free.

Activation checkpointing divides the kept bytes by about the number of blocks, so a bound that misses it takes far too
much from model data. Models of transformers, and others with the same flag, tell that they checkpoint. A model that
calls `torch.utils.checkpoint` itself does not, and may have less model data on the device than there is room for, in
its first step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from gemini.model.tensors import tensors_in
from gemini.model.workload import blocks_of, workload_of

_WRAPPER = "CheckpointWrapper"  # class name in torch.distributed
_FLAG = "gradient_checkpointing"  # attribute of modules in transformers and other libraries


def most_activations(module: nn.Module, inputs: Any) -> int | None:
    """An upper bound, in bytes, of the non-model data of one forward of these inputs and its backward.

    None if there is no bound. Reads shapes and dtypes only. Local; raises nothing.
    """
    tokens, blocks = _num_tokens(inputs), list(blocks_of(module).values())
    embeds = any(isinstance(each, nn.Embedding) for each in module.modules())
    parameters = list(module.parameters())
    trained = [each for each in parameters if each.requires_grad]
    # Without token ids, an embedding and blocks the formulas do not hold; without trained weights nothing is kept.
    if not (tokens and blocks and embeds and trained):
        return None
    itemsize, stream_itemsize = _itemsizes(parameters)
    work = workload_of(module, itemsize, stream_itemsize=stream_itemsize)
    if not work.covers_activations or not work.block_product_elements:
        return None
    # Activations, the gradients that autograd holds, and under autocast the casts of weights.
    kept = work.activation_bytes(
        tokens, is_checkpointed=_checkpointed(module, blocks), num_without_graph=_num_without_graph(module, blocks)
    )
    return kept + gradient_bytes(module) + (_cast_bytes(blocks, itemsize) if itemsize != stream_itemsize else 0)


def gradient_bytes(module: nn.Module, itemsize: int | None = None) -> int:
    """Bytes of gradients that autograd holds before it passes them on, at the start of backward.

    One whole gradient at a time; of a tied weight three: those of two uses, and their sum. itemsize: bytes of an
    element, if the weights will be cast. None: their own. Local; raises nothing.
    """
    uses = Counter(each for _, each in module.named_parameters(remove_duplicate=False) if each.requires_grad)
    sizes = (each.numel() * (itemsize or each.element_size()) * (3 if count > 1 else 1) for each, count in uses.items())
    return max(sizes, default=0)


def _cast_bytes(blocks: list[nn.Module], itemsize: int) -> int:
    """Bytes of weights that autocast has cast: those of the largest block. Casts of the others are not kept."""
    return max(sum(each.numel() for each in block.parameters()) for block in blocks) * itemsize


def _num_tokens(inputs: Any) -> int:
    """The number of token ids of shape (batch, length); the larger one of an encoder and a decoder. 0: no ids."""
    ids = [each for each in tensors_in(inputs) if each.dtype in (torch.int64, torch.int32) and not each.is_nested]
    return max((each.numel() for each in ids if each.dim() == 2), default=0)


def _itemsizes(parameters: list[nn.Parameter]) -> tuple[int, int]:
    """Bytes per element: of inputs and outputs of matrices, and of the residual stream between blocks.

    Both have the dtype of most weights. Under autocast matrix products have its dtype instead.
    """
    counts: Counter[torch.dtype] = Counter()
    for each in parameters:
        # By elements: small tensors of another dtype, such as norms in fp32, may be more in number.
        counts[each.dtype] += each.numel()
    dtype, device = counts.most_common(1)[0][0], parameters[0].device.type
    is_cast = torch.is_autocast_enabled(device)
    return (torch.get_autocast_dtype(device) if is_cast else dtype).itemsize, dtype.itemsize


def _checkpointed(module: nn.Module, blocks: list[nn.Module]) -> list[bool]:
    """Whether each block is checkpointed, by its own flags, or by the model's flags if no block has one."""
    # The blocks of most models of transformers have the flag (`GradientCheckpointingLayer`); in others the model has
    # it.
    by_block = [[flag for each in block.modules() if (flag := _flag_of(each)) is not None] for block in blocks]
    if any(by_block):
        return [any(flags) for flags in by_block]
    return [any(map(_flag_of, module.modules()))] * len(blocks)


def _flag_of(module: nn.Module) -> bool | None:
    """Whether the module checkpoints activations. None: it has no flag."""
    if type(module).__name__ == _WRAPPER:
        return True
    # Modules of transformers ignore their flag in evaluation mode.
    flag = getattr(module, _FLAG, None)
    return None if flag is None else bool(flag) and module.training


def _num_without_graph(module: nn.Module, blocks: list[nn.Module]) -> int:
    """The number of blocks before the first trained parameter, in the order of the module tree.

    Their inputs need no gradient, so autograd keeps nothing of them.
    """
    count = 0
    inside = {each for block in blocks for each in block.modules()}
    for each in module.modules():
        # Blocks are counted with their parent, below.
        if each in inside:
            continue
        if any(parameter.requires_grad for parameter in each.parameters(recurse=False)):
            break
        for child in each.children():
            if child in blocks:
                if any(parameter.requires_grad for parameter in child.parameters()):
                    return count
                count += 1
    return count
