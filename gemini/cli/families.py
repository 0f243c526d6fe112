"""Well-known families of models from their config.json alone: modules of which only names and shapes exist.

To import transformers takes longer than to plan a model of 7 billion parameters, and nobody needs it installed to ask
whether a model fits. `tests/features/test_plan_families.py` compares these modules with those of transformers; a config
with a key that could change a shape, and that is not known here, is left to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gemini.model.estimate import of_dtype

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Of the families: do queries, keys and values have biases, and norms of their own?
_FAMILIES = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
_HEADS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# What says nothing of shapes: tokens, initial values, rotations, attention masks, generation, and who wrote the file.
# fmt: off
_SHAPELESS = frozenset((
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "layer_types",
    "max_position_embeddings", "max_window_layers", "model_type", "name_or_path", "num_key_value_heads",
    "pad_token_id", "pretraining_tp", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "sliding_window", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window",
    "head_dim", "attention_bias", "mlp_bias", "hidden_act", "_name_or_path", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id",
    "problem_type", "source",
))
# fmt: on


def known(config: Mapping[str, Any]) -> nn.Module | None:
    """The model on "meta" that a config.json describes. None: it is of no family that is known here.

    Local; nothing is allocated.
    """
    kind = config.get("model_type")
    heads = config.get("architectures") or ["LlamaForCausalLM"]
    sizes = [config.get(name) for name in (*_SIZES, "num_key_value_heads")]
    if kind not in _FAMILIES or heads[0] not in _HEADS or not all(type(size) is int and size > 0 for size in sizes):
        return None
    # A key that this page has not thought of may mean other weights. Written as activation functions of several
    # operations, others than "silu" keep more than one kernel does.
    strange = set(config) - {*_SIZES, *_SHAPELESS}
    if strange or config.get("hidden_act", "silu") != "silu" or config["hidden_size"] % config["num_attention_heads"]:
        return None
    # Qwen3 has a default of its own for the width of a head.
    if kind == "qwen3" and type(config.get("head_dim")) is not int:
        return None
    # Older files say torch_dtype.
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    if not isinstance(dtype, torch.dtype):
        return None
    with torch.device("meta"):
        return of_dtype(_CausalLM(config), dtype)


class _Linear(nn.Linear):
    """Without initial values, whose functions torch would import for "meta" alone: a second."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"))


class _Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        has_bias, has_norms = _FAMILIES[config["model_type"]]
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        is_biased = bool(config.get("attention_bias", False)) and config["model_type"] in ("llama", "qwen3")
        keys = width * config["num_key_value_heads"]
        # The order of attributes is the order of parameters, in which chunks are filled.
        self.q_proj = _Linear(hidden, width * heads, bias=has_bias or is_biased)
        self.k_proj = _Linear(hidden, keys, bias=has_bias or is_biased)
        self.v_proj = _Linear(hidden, keys, bias=has_bias or is_biased)
        self.o_proj = _Linear(width * heads, hidden, bias=is_biased)
        if has_norms:
            self.q_norm, self.k_norm = _Norm(width), _Norm(width)


class _Mlp(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        is_biased = bool(config.get("mlp_bias", False)) and config["model_type"] == "llama"
        self.gate_proj = _Linear(hidden, inner, bias=is_biased)
        self.up_proj = _Linear(hidden, inner, bias=is_biased)
        self.down_proj = _Linear(inner, hidden, bias=is_biased)


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = _Norm(config["hidden_size"])
        self.post_attention_layernorm = _Norm(config["hidden_size"])


class _Trunk(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = _Norm(config["hidden_size"])


class _CausalLM(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.model = _Trunk(config)
        self.lm_head = _Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config.get("tie_word_embeddings", False):
            self.lm_head.weight = self.model.embed_tokens.weight
