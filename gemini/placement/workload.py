"""The workload of a batch of tokens besides model data: FLOPs, and the activations that autograd keeps. Pure.

Both follow from the sizes of the modules' weights, for models of tokens such as transformers:

- FLOPs of a forward: 2 for each element of a weight that a token is multiplied with, and 2 x length x (width of keys +
  width of values) for the products of attention in each layer (Chowdhery et al. 2022, PaLM, appendix B, where forward
  and backward together are 6 N + 12 L H Q T for each token). Only the experts that a token is routed to count.
- Activations: an upper bound. A matrix (in, out) keeps its input, and what follows keeps at most two tensors of the
  size of its output: 1 x in + 2 x out elements for each token, and 4 x out more if an activation function is written
  as several operations (GPT-2's GELU). A norm keeps its input in fp32 and two outputs. Scores of attention are not
  kept (fused kernels). The last matrix makes logits, of which a loss keeps three copies in fp32.
  This is Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, for any
  module: their 34 s b h bytes of a GPT layer are at most 66 s b h by this rule, where norms keep fp32.
- With activation checkpointing each block keeps only its input, and one block at a time keeps all that it recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOSS_BYTES = 12
"""Bytes that a loss keeps for each logit: the value, the log-probability and the gradient, each in fp32."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload of one token through one model, in elements unless the name says bytes.

    Args:
        product_elements: elements of weights that the token is multiplied with.
        block_product_elements: those in blocks, which activation checkpointing computes again.
        attention_width: width of keys and values that the token is compared with at each position, over all layers.
        block_bytes: bytes of the activations that each block keeps, block by block.
        block_input_bytes: bytes of the input of one block.
        outer_bytes: bytes of the activations that modules outside of blocks keep.
        logit_bytes: bytes of the logits and of what the loss keeps of them.
        notes: sentences about parts of the model that these formulas do not know.
        covers_activations: whether the formulas cover the activations of this model.
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
        """FLOPs of the forward of a batch of `tokens`, in sequences of `length`."""
        return 2.0 * tokens * (self.product_elements + length * self.attention_width)

    def computed_again_flops(self, tokens: int, length: int) -> float:
        """FLOPs that activation checkpointing of every block adds to that."""
        return 2.0 * tokens * (self.block_product_elements + length * self.attention_width)

    def activation_bytes(
        self, tokens: int, *, is_checkpointed: bool | Sequence[bool], num_without_graph: int = 0
    ) -> int:
        """An upper bound of the bytes that a batch of `tokens` keeps at once.

        Without checkpointing the peak is at the start of the backward: all blocks and the logits. With checkpointing it
        is the inputs of all blocks plus the larger of the logits and one block, because the logits are freed before the
        first block is recomputed.

        is_checkpointed: whether all blocks are checkpointed, or one flag for each. num_without_graph: the number of
            blocks before everything that is trained. They keep nothing; one at a time needs its activations.
        """
        flags = [is_checkpointed] * len(self.block_bytes) if isinstance(is_checkpointed, bool) else is_checkpointed
        pairs = list(zip(self.block_bytes, flags, strict=True))
        kept = sum(self.block_input_bytes if flag else each for each, flag in pairs[num_without_graph:])
        again = (each for place, (each, flag) in enumerate(pairs) if flag or place < num_without_graph)
        return tokens * (kept + self.outer_bytes + max(self.logit_bytes, max(again, default=0)))
