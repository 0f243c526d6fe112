"""Tiny Hugging Face models from configs: no download, and transformers is imported at the first build."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256


class TokenLoss(nn.Module):
    """Tokens in, the wrapped model's own loss out."""

    def __init__(self, model: nn.Module, shifted: bool = True) -> None:
        super().__init__()
        self.model = model
        self.shifted = shifted

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        output = self.model(input_ids=tokens, labels=tokens)
        if output.logits.dtype != torch.float64:
            return output.loss
        # transformers computes losses in fp32, which a comparison in fp64 would see
        logits, labels = (output.logits[:, :-1], tokens[:, 1:]) if self.shifted else (output.logits, tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ImageLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.model(pixel_values=images, labels=labels).loss


def _checkpointed(model: Any, reentrant: bool | None) -> Any:
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:  # a reentrant region whose inputs need no gradient gives its parameters none
            model.enable_input_require_grads()
    return model


def gpt2(attention: str = "sdpa", reentrant: bool | None = None) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=64,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation=attention,
    )
    return TokenLoss(_checkpointed(transformers.GPT2LMHeadModel(config), reentrant))


def llama(reentrant: bool | None = None) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return TokenLoss(_checkpointed(transformers.LlamaForCausalLM(config), reentrant))


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return TokenLoss(transformers.BertForMaskedLM(config), shifted=False)


def t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return TokenLoss(transformers.T5ForConditionalGeneration(config), shifted=False)


def vit() -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return ImageLoss(transformers.ViTForImageClassification(config))


def mixtral() -> nn.Module:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
        output_router_logits=True,
    )
    return TokenLoss(transformers.MixtralForCausalLM(config))


def qwen3_moe() -> nn.Module:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
        experts_implementation="eager",  # Mixtral keeps the default, grouped_mm, which has no fp64
    )
    return TokenLoss(transformers.Qwen3MoeForCausalLM(config))


def neox() -> nn.Module:
    import transformers

    config = transformers.GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    return TokenLoss(transformers.GPTNeoXForCausalLM(config))
