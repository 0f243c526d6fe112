"""What a batch of tokens asks of a device besides model data: FLOPs, and the activations that autograd keeps. Pure.

Both follow from the sizes of the modules' weights, for models of tokens such as transformers:

- FLOPs of a forward: 2 for each element of a weight that a token is multiplied with, and 2 x length x (width of keys +
  width of values) for the products of attention in each layer (Chowdhery et al. 2022, PaLM, appendix B, where forward
  and backward together are 6 N + 12 L H Q T for each token). Only experts that a token is sent to count.
- Activations: a bound. Of a matrix (in, out) the input is kept, and of the output what follows keeps at most two
  tensors of its size: 1 x in + 2 x out elements of each token, and 4 x out more where an activation function is
  written as several operations (GPT-2's GELU). Of a norm its input in fp32, and two of its outputs. Scores of
  attention are not kept (fused kernels). The last matrix makes logits, of which a loss keeps three copies in fp32.
  This is Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, for any
  module: their 34 s b h bytes of a GPT layer are at most 66 s b h by this rule, where norms keep fp32.
- With activation checkpointing each block keeps its input alone, and one block at a time all that it computes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOSS_BYTES = 12
"""Of a logit, besides the logit itself: in fp32 its value, its log-probability and its gradient."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Of one token through one model; elements unless bytes are named.

    Args:
        product_elements: of weights that the token is multiplied with.
        block_product_elements: those of them in blocks, which activation checkpointing computes again.
        attention_width: of keys and values that the token is compared with at each position, over all layers.
        block_bytes: of activations that each block keeps, block by block.
        block_input_bytes: of the input of one block.
        outer_bytes: of activations that what is outside of blocks keeps.
        logit_bytes: of logits and what the loss keeps of them.
        notes: what of the model is not known, in words.
        covers_activations: the bytes of activations follow from these formulas.
    """

    product_elements: float
    block_product_elements: float
    attention_width: int
    block_bytes: tuple[int, ...]
    block_input_bytes: int
    outer_bytes: int
    logit_bytes: int
    notes: tuple[str, ...] = ()
    covers_activations: bool = True

    def forward_flops(self, tokens: int, length: int) -> float:
        """Of a batch of `tokens`, in sequences of `length`."""
        return 2.0 * tokens * (self.product_elements + length * self.attention_width)

    def computed_again_flops(self, tokens: int, length: int) -> float:
        """Of the forward, with activation checkpointing of every block."""
        return 2.0 * tokens * (self.block_product_elements + length * self.attention_width)

    def activation_bytes(
        self, tokens: int, *, is_checkpointed: bool | Sequence[bool], num_without_graph: int = 0
    ) -> int:
        """The most that a batch of `tokens` keeps at once, an upper bound.

        Without checkpointing all blocks and the logits, when the backward begins. With it the inputs of all blocks, and
        the logits or the block that keeps most, since the logits are gone when the first block is computed again.

        is_checkpointed: all blocks are, or each of them. num_without_graph: the first blocks, before everything that is
            trained: they keep nothing, and one at a time takes what it would keep.
        """
        flags = [is_checkpointed] * len(self.block_bytes) if isinstance(is_checkpointed, bool) else is_checkpointed
        pairs = list(zip(self.block_bytes, flags, strict=True))
        kept = sum(self.block_input_bytes if flag else each for each, flag in pairs[num_without_graph:])
        again = (each for place, (each, flag) in enumerate(pairs) if flag or place < num_without_graph)
        return tokens * (kept + self.outer_bytes + max(self.logit_bytes, max(again, default=0)))
