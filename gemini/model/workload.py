"""What a step will need beside the model's states, known before the first one and after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.model.operators import chooses, tensors_in
from gemini.placement.demand import LOSS_BYTES, Workload

# -- The workload of one token in a module. `gemini/placement/demand.py` explains the formulas.
#
# Reads only shapes, so a module on "meta" is enough.


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_STEPWISE = re.compile(r"(New|Fast|Quick|Accurate)GELU(Activation)?")
"""Activation functions of transformers that are written as several operations, each of which keeps its input."""
_STEPS_KEPT = 4  # tensors that such a function keeps in addition to those of a single kernel
# Models of transformers have different names for the number of experts, and of those that a token is sent to.
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_top_k", "top_k_experts")


@dataclass
class _Sum:
    """Elements that one token is multiplied with in some modules, and bytes of activations that they keep."""

    products: float = 0.0
    kept_bytes: float = 0.0

    def add(self, *, products: float = 0.0, kept_bytes: float = 0.0) -> None:
        """Count what one more weight is multiplied with, and what it makes the modules keep."""
        self.products += products
        self.kept_bytes += kept_bytes


def workload_of(
    module: nn.Module, itemsize: int, experts_per_token: int | None = None, *, stream_itemsize: int | None = None
) -> Workload:
    """The workload of one token, with activations of `itemsize` bytes per element. Reads no values; local.

    Blocks are the elements of the module list with the most parameters. Raises nothing: the notes name what is unknown.

    experts_per_token: experts that a token is routed to. None: as the model's config says.
    stream_itemsize: bytes per element of the residual stream and of norms, which autocast leaves in the dtype of the
        weights. None: `itemsize`.
    """
    stream = itemsize if stream_itemsize is None else stream_itemsize
    config = text_config(module)
    experts, notes = _Experts(config, experts_per_token), []
    blocks = list(blocks_of(module).values())
    inside = {each for block in blocks for each in block.modules()}
    sums = [_sum_of(block.modules(), itemsize, stream, experts) for block in blocks]
    # The head counts apart: its output is the logits, of which the loss keeps more copies.
    outer_modules = [each for each in module.modules() if each not in inside]
    head = _head(outer_modules)
    outer = _sum_of((each for each in outer_modules if each is not head), itemsize, stream, experts)
    logit_bytes = 0
    # The head keeps its input, like any matrix, and instead of two outputs the copies of the logits.
    if head is not None:
        # `head.weight` of a parametrized head would be computed, which moves the buffers of some parametrizations.
        outer.add(products=head.in_features * head.out_features, kept_bytes=head.in_features * itemsize)
        logit_bytes = head.out_features * (itemsize + LOSS_BYTES)
    width = _attention_width(config, len(blocks))
    if config is None:
        notes.append("The model has no config: products of attention are not counted.")
    # Known only after `_sum_of` has gone through all modules: it asks for the share of each list of experts.
    if experts.is_unknown:
        notes.append("How many experts a token is sent to is not known, so all count: see --experts-per-token.")
    # A convolution uses its weight once for each position of the output, which no shape of a weight tells.
    found = dict.fromkeys(type(each).__name__ for each in module.modules() if isinstance(each, _CONVOLUTIONS))
    if found:
        notes.append(f"{', '.join(found)}: counted as if its weights were used once for each token.")
    in_blocks = sum(each.products for each in sums)
    return Workload(
        product_elements=in_blocks + outer.products,
        block_product_elements=in_blocks,
        attention_width=width,
        block_bytes=tuple(int(each.kept_bytes) for each in sums),
        block_input_bytes=_input_width(blocks) * stream,
        outer_bytes=int(outer.kept_bytes),
        logit_bytes=logit_bytes,
        notes=tuple(notes),
        covers_activations=not experts.is_unknown and not found,
    )


def text_config(module: nn.Module) -> Any:
    """The config of the part of the model that processes tokens. None: the module has no config."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:
        # The config has several text parts, and transformers does not choose among them.
        return config


class _Experts:
    """The number of experts that a token is routed to, by the model's config."""

    def __init__(self, config: Any, per_token: int | None) -> None:
        self.count = next((getattr(config, name) for name in _NUM_EXPERTS if getattr(config, name, None)), None)
        found = next((getattr(config, name) for name in _EXPERTS_PER_TOKEN if getattr(config, name, None)), None)
        self.chosen = per_token or found
        self.is_unknown = False

    def share_of(self, num_experts: int) -> float:
        """The fraction of `num_experts` that a token is routed to. 1 if it is unknown, which the caller reports."""
        if self.chosen is None:
            self.is_unknown = True
            return 1.0
        return min(1.0, float(self.chosen) / num_experts)


def blocks_of(root: nn.Module) -> dict[str, nn.Module]:
    """The model's layers by name: the elements of the outermost module list with the most parameters. Local."""
    kinds = (nn.ModuleList, nn.Sequential)
    lists = {name: each for name, each in root.named_modules() if isinstance(each, kinds) and len(each) > 1}
    # Lists inside another list are parts of a block.
    inner = {below for each in lists.values() for below in each.modules() if below is not each}
    sizes = {name: sum(p.numel() for p in each.parameters()) for name, each in lists.items() if each not in inner}
    if not sizes:
        return {}
    name = max(sizes, key=sizes.__getitem__)
    return {f"{name}.{child}" if name else child: each for child, each in lists[name].named_children()}


def _head(modules: list[nn.Module]) -> nn.Linear | None:
    """The last matrix outside of the blocks, which makes the logits."""
    found = [each for each in modules if isinstance(each, nn.Linear)]
    return found[-1] if found else None


def _sum_of(modules: Iterator[nn.Module] | list[nn.Module], itemsize: int, stream: int, experts: _Experts) -> _Sum:
    found, shares, widest, num_stepwise = _Sum(), dict[nn.Module, float](), 0, 0
    for module in modules:
        share = shares.get(module, 1.0)
        num_stepwise += _STEPWISE.fullmatch(type(module).__name__) is not None
        # A token uses only some of the experts in a list. Parents come first, so an expert's modules have their share
        # here before the loop reaches them.
        if chooses(module):
            lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) > 1]
            for each in lists:
                shares.update(dict.fromkeys(each.modules(), experts.share_of(len(each))))
        for parameter in module.parameters(recurse=False):
            shape, numel = parameter.shape, parameter.numel()
            # An embedding multiplies nothing: each token takes one row of it into the residual stream.
            if isinstance(module, nn.Embedding) and len(shape) == 2:
                found.add(kept_bytes=shape[1] * stream)
            elif len(shape) == 3 and (experts.count is None or shape[0] == experts.count):
                # Experts in one tensor: (experts, in, out) or (experts, out, in). Assume the larger side is the output.
                used = experts.share_of(shape[0])
                expert_bytes = shape[0] * used * (sum(shape[1:]) + max(shape[1:])) * itemsize
                found.add(products=numel * used, kept_bytes=expert_bytes)
            elif len(shape) >= 2:
                # Conv1D of transformers has (in, out), with out as `nf`. Of an unknown module take the larger side.
                rows = module.out_features if isinstance(module, nn.Linear) else getattr(module, "nf", max(shape))
                columns, widest = numel // max(1, rows), max(widest, rows)
                # A matrix keeps its input for the gradient of its weight alone, so a frozen one does not. What follows
                # it keeps up to two tensors of its output's size.
                kept = columns + 2 * rows if parameter.requires_grad else 2 * rows
                found.add(products=numel * share, kept_bytes=share * kept * itemsize)
            # A norm keeps its input in fp32, 4 bytes per element, and two outputs.
            elif len(shape) == 1 and _is_norm(module):
                found.add(kept_bytes=share * numel * (4 + 2 * stream))
    # A stepwise activation function is taken to work on the output of the widest matrix, as in an MLP.
    found.add(kept_bytes=num_stepwise * _STEPS_KEPT * widest * stream)
    return found


def _is_norm(module: nn.Module) -> bool:
    """Whether a one-dimensional weight of this module is that of a norm. Other ones are biases, which keep nothing."""
    return "norm" in type(module).__name__.lower()


def _attention_width(config: Any, num_blocks: int) -> int:
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or not heads:
        return 0
    # Every query head is compared with keys, also where several heads share them. Latent attention of DeepSeek has keys
    # and values of different widths.
    own = getattr(config, "head_dim", None) or hidden // heads
    keys, values = (getattr(config, name, None) or own for name in ("qk_head_dim", "v_head_dim"))
    return num_blocks * heads * (keys + values)


def _input_width(blocks: list[nn.Module]) -> int:
    """The width of the residual stream: the input width of the first weight of a block."""
    if not blocks:
        return 0
    widths = [
        module.in_features if isinstance(module, nn.Linear) else parameter.shape[-1]
        for module in blocks[0].modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dim()
    ]
    return int(widths[0]) if widths else 0


# -- An upper bound of the non-model bytes of the first batch, before a step has measured them.
#
# The bound is that of `gemini plan`, for the batch at hand: see `gemini/placement/demand.py` for its formulas. It
# exists only if tokens can be counted and the formulas cover the model: token ids pass through an embedding into a list
# of blocks with matrices. For any other model there is no bound, and the default fraction of the device is left free.
#
# Activation checkpointing divides the kept bytes by about the number of blocks, so a bound that misses it takes far too
# much from model data. Models of transformers, and others with the same flag, tell that they checkpoint. A model that
# calls `torch.utils.checkpoint` itself does not, and may have less model data on the device than there is room for, in
# its first step.


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
