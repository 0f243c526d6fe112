"""The model of the CPU's cases: transformers' GPT-2 with random weights and without dropout, of any size."""

from __future__ import annotations

import torch
from torch import nn


def gpt2(*, vocab: int, positions: int, width: int, layers: int, heads: int) -> nn.Module:
    """In fp32, the same on every call: (batch, sequence) tokens in, and with `labels=` a mean next-token loss out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab,
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config)
