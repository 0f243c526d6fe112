"""Models that a library loads from files, inside a `ZeroInitContext`."""

import argparse
import inspect
import logging
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers

from gemini import ShardedModel, ShardedOptimizer, ZeroInitContext
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo import building


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """The directory of a small GPT-2 in several files."""
    torch.manual_seed(1)
    building.gpt2().save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return str(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("streams", "dtype"), [(True, None), (True, torch.float32), (False, None)], ids=str)
@on_ranks(1, 2)
def test_a_saved_model_is_loaded_by_from_pretrained(
    rank: int, world_size: int, saved: str, streams: bool, dtype: torch.dtype | None
) -> None:
    """Outputs equal the plain model's bit for bit; what differs is where it is held."""
    chosen = {} if streams else {"HF_DEACTIVATE_ASYNC_LOAD": "0"}  # the user's own choice stands
    with patch.dict(os.environ, chosen):
        plain = transformers.AutoModelForCausalLM.from_pretrained(saved).eval()
        with ZeroInitContext(dtype=dtype) as context:
            model = transformers.AutoModelForCausalLM.from_pretrained(saved).eval()
    assert context._store is not None and len(context._store.chunks.links()) == len(list(plain.parameters()))
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        expected = plain(tokens).logits
        assert torch.equal(model(tokens).logits, expected), "before it is wrapped it reads its parameters one by one"
        assert torch.equal(ShardedModel(model)(tokens).logits, expected)


@on_ranks(2)
def test_a_real_model_is_fine_tuned(rank: int, world_size: int, sentence_encoder: str) -> None:
    """MiniLM has the outputs of the plain one, and learns to tell sentences of two kinds apart."""
    import transformers

    with ZeroInitContext():
        encoder = transformers.AutoModel.from_pretrained(sentence_encoder)
    model = ShardedModel(encoder.eval(), tensor_placement_policy="cpu")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=2e-5))
    tokenizer = transformers.AutoTokenizer.from_pretrained(sentence_encoder)
    sources = [inspect.getsource(module).splitlines() for module in (argparse, logging)]
    kinds = [[line.strip() for line in source if len(line) > 60] for source in sources]
    texts = [kind[2 * rank + i] for kind in kinds for i in range(2)]
    batch = tokenizer(texts, padding="max_length", max_length=24, truncation=True, return_tensors="pt")

    def embeddings() -> torch.Tensor:
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    with torch.no_grad():
        plain = transformers.AutoModel.from_pretrained(sentence_encoder).eval()
        assert torch.equal(model(**batch).last_hidden_state, plain(**batch).last_hidden_state)
    losses = []
    for _ in range(4):
        found = embeddings()
        alike = found @ found.t() / 0.1
        target = torch.tensor([1, 0, 3, 2])
        loss = torch.nn.functional.cross_entropy(alike - torch.eye(4) * 1e4, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert model.observer.num_fetches > 0
