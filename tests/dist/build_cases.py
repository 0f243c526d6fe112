"""Ranks that build one model together, though their random numbers differ."""

import argparse
import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini import (
    DivergenceError,
    GatheredParameters,
    ReleasedParameterError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    ZeroInitContext,
)
from gemini.placement.demand import Kind
from optim import HybridAdam
from sharding import BucketTensorShardStrategy, ChunkShardStrategy, TensorShardStrategy
from tests import building
from tests.harness.live_storages import LiveStorages
from tests.zoo.mlp import weights_of

FP32 = 4
STRATEGIES = (TensorShardStrategy, BucketTensorShardStrategy, ChunkShardStrategy)


def _plain(name: str, seed: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    return building.MODELS[name](), torch.get_rng_state()


def rank_0s_values_win(rank: int, world_size: int, names: list[str]) -> None:
    """Random numbers stay each rank's own; weights are rank 0's, before and after wrapping."""
    for number, name in enumerate(names):
        expected, _ = _plain(name, 5)
        _, random_numbers = _plain(name, 5 + 100 * rank)
        torch.manual_seed(5 + 100 * rank)
        with ZeroInitContext(shard_strategy=STRATEGIES[number % 3]) as context:
            model = building.MODELS[name]()
        assert torch.equal(torch.get_rng_state(), random_numbers), name
        store = context._store
        assert store is not None and store.num_parameters == len(list(model.parameters())), name
        shards = sum(chunk.homes[Kind.PARAM].flat.nbytes for chunk in store._chunks)
        numel = sum(p.numel() for p in model.parameters() if p.dtype is torch.float32)
        padding = 256 * FP32 * sum(2 + len(chunk.parameters) for chunk in store._chunks)
        assert shards <= numel * FP32 // world_size + padding, (name, shards, numel)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        for key, value in expected.named_parameters():
            assert torch.equal(state[key], value), (name, key)
        sharded = ShardedModel(model, STRATEGIES[(number + 1) % 3], chunk_size=1024)
        for key, value in expected.named_parameters():
            assert torch.equal(sharded.state_dict()[key], value), (name, key)


def training_after_it_equals_plain_wrapping(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    if wrap.get("dtype") == "bf16":
        wrap = wrap | {"dtype": torch.bfloat16}
    results = []
    for build_sharded in (True, False):
        torch.manual_seed(3)
        with ZeroInitContext(enabled=build_sharded):
            module = building.EditedByParent()
        model = ShardedModel(module, chunk_size=512, **wrap)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=0.01))
        for step in range(3):
            tokens = (torch.arange(26).view(2, 13) + rank + step) % 13
            model(tokens).logsumexp(-1).mean().backward()
            optimizer.step()
        results.append((weights_of(model), optimizer.state_dict()["masters"]))
    for key, value in results[0][0].items():
        assert torch.equal(value, results[1][0][key]), key
    for number, master in results[0][1].items():
        assert torch.equal(master, results[1][1][number]), number


def memory_while_building(rank: int, world_size: int, name: str, source: str | None) -> dict[str, int]:
    """Peaks of all live storages after each phase, in bytes, and what they may be made of."""
    build = {"deep": building.deep, "top heavy": building.top_heavy}.get(name)

    def make() -> nn.Module:
        if build is not None:
            return build()
        import transformers

        return transformers.AutoModel.from_pretrained(source)  # type: ignore[no-any-return]

    with LiveStorages() as live:
        with ZeroInitContext():
            module = make()
        context_peak = live.peak_bytes
        numel = sum(p.numel() for p in module.parameters())
        operator = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in module.modules()) * FP32
        buffers = sum(b.nbytes for b in module.buffers())
        model = ShardedModel(module, device="emulated", tensor_placement_policy="cpu")
        wrap_rest = sum(tier.ledger.total_bytes for tier in model.chunk_manager.memory.tiers)
        wrap_peak = live.peak_bytes
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
        rest = sum(tier.ledger.total_bytes for tier in model.chunk_manager.memory.tiers)
        peak = live.peak_bytes
    assert optimizer is not None
    return {
        "numel": numel,
        "operator": operator,
        "chunk": max(chunk.payload_bytes for chunk in model.chunk_manager.chunks if not chunk.oversize),
        "buffers": buffers,
        "num_parameters": len(list(model.parameters())),
        "context peak": context_peak,
        "wrap peak": wrap_peak,
        "wrap rest": wrap_rest,
        "peak": peak,
        "rest": rest,
    }


def gathered_while_building(rank: int, world_size: int) -> None:
    """One rank initialises, as DeepSpeed's users write it; the others look on."""
    last = world_size - 1
    with ZeroInitContext():
        model = building.deep(16, 3)
        with GatheredParameters([model[0].weight, model[1].bias], modifier_rank=last):
            if rank == last:
                nn.init.constant_(model[0].weight, 3.0)
                model[1].bias.data[2] = 5.0
    assert torch.equal(model[0].weight.clone(), torch.full((16, 16), 3.0))
    assert model[1].bias.clone()[2] == 5


def caught_errors_and_the_users_memory(rank: int, world_size: int) -> None:
    """What fails in the user's hands is the user's; ranks may look at `.data` alone; given tensors stay as they are."""
    table = torch.full((3000, 100), float(rank))
    with ZeroInitContext():
        embedding = nn.Embedding.from_pretrained(table)
        first, second, third = nn.Linear(300, 3), nn.Linear(3, 3), nn.Linear(2, 2)
        expected = first.weight.clone()
        second.weight.norm()
        try:
            first.weight.fill_(1.0)
        except RuntimeError:
            assert torch.equal(first.weight.clone(), expected)
        if rank == 0:
            assert first.weight.data.numel() == 900
        second.weight.norm()
        third.weight.norm()
    assert table.unique().tolist() == [float(rank)], "rank 0's values were written into the user's tensor"
    assert embedding.weight.clone().unique().tolist() == [0.0]


def caught_error_between_micro_batches(rank: int, world_size: int) -> float:
    model = ShardedModel(nn.Linear(4, 4), device="emulated")
    x = torch.ones(1, 4)
    model(x).sum().backward()
    try:
        model.module.weight.numpy()
    except RuntimeError:
        model.module.weight.detach().numpy()
    model(x).sum().backward()
    gradient: torch.Tensor = model.module.bias.grad  # type: ignore[assignment]
    return gradient[0].item()


def a_model_of_some_ranks_then_of_all(rank: int, world_size: int) -> None:
    some = torch.distributed.new_group([0, 1])
    if rank < 2:
        with ZeroInitContext(process_group=some):
            module = nn.Linear(3, 3)
        ShardedModel(module, process_group=some, device="emulated", rank_timeout=20)(torch.ones(1, 3))
    model = ShardedModel(nn.Linear(3, 3), device="emulated", rank_timeout=20)
    model(torch.ones(1, 3)).sum().backward()


# -- ranks that do not build the same


def one_raises(rank: int, world_size: int) -> str:
    try:
        with ZeroInitContext():
            layers = [nn.Linear(3, 3) for _ in range(3)]
            if rank == 1:
                raise ValueError("no such layer on rank 1")
            layers += [nn.Linear(3, 3) for _ in range(3)]
    except (ValueError, RemoteRankError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def another_operator(rank: int, world_size: int) -> str:
    try:
        with ZeroInitContext():
            nn.Linear(3, 3 + rank)
            nn.LayerNorm(3)
    except DivergenceError as error:
        return str(error)
    return "nothing"


def another_use(rank: int, world_size: int) -> str:
    """Both gather, but other parameters."""
    try:
        with ZeroInitContext(), torch.no_grad():
            layers = [nn.Linear(3, 3) for _ in range(3)]
            layers[rank].weight.sum().item()
    except DivergenceError as error:
        return str(error)
    return "nothing"


def a_late_write(rank: int, world_size: int) -> str:
    try:
        with ZeroInitContext(), torch.no_grad():
            first, second = nn.Linear(300, 3), nn.Linear(3, 3)
            nn.Linear(2, 2)
            row = first.weight[0]
            second.weight.zero_()
            row.zero_()
            first.weight.sum()
    except ReleasedParameterError as error:
        return str(error)
    return "nothing"


def pretrained(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """Outputs equal the plain model's bit for bit; what differs is where it is held."""
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with ZeroInitContext(dtype=torch.float32):
        module = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    model = ShardedModel(module)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
    return {"files": [path.name for path in Path(directory).iterdir()]}


def tuned_sentence_encoder(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """MiniLM, built from its file, fine-tuned to tell sentences of two kinds apart; its losses, and outputs first."""
    import transformers

    with ZeroInitContext():
        encoder = transformers.AutoModel.from_pretrained(directory)
    model = ShardedModel(encoder.eval(), tensor_placement_policy="cpu")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=2e-5))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    sources = [inspect.getsource(module).splitlines() for module in (argparse, logging)]
    kinds = [[line.strip() for line in source if len(line) > 60] for source in sources]
    texts = [kind[2 * rank + i] for kind in kinds for i in range(2)]
    batch = tokenizer(texts, padding="max_length", max_length=24, truncation=True, return_tensors="pt")

    def embeddings() -> torch.Tensor:
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    with torch.no_grad():
        plain = transformers.AutoModel.from_pretrained(directory).eval()
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
    return {"losses": losses, "fetches": model.observer.num_fetches}
