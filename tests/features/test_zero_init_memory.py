"""Building holds no more than a rank's shards, an operator and a chunk, measured over all live storages."""

import pytest
import torch
from torch import nn

from gemini import MemoryMonitor, ShardedModel, ShardedOptimizer, ZeroInitContext
from gemini.building import zero_init
from gemini.memory.arena import HostTier
from gemini.memory.memory import EmulatedTier
from optim import HybridAdam
from tests.harness.live_storages import LiveStorages
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import building

FP32 = 4


def _peaks_while_building(name: str, source: str | None = None) -> dict[str, int]:
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
        "shard": max(chunk.layout.shard_numel for chunk in model.chunk_manager.chunks) * FP32,
        "buffers": buffers,
        "num_parameters": len(list(model.parameters())),
        "context peak": context_peak,
        "wrap peak": wrap_peak,
        "wrap rest": wrap_rest,
        "peak": peak,
        "rest": rest,
    }


@pytest.mark.sampled(2)
@on_ranks_with("name", {1: ["deep", "top heavy"], 2: ["deep", "top heavy"], 3: ["top heavy"], 4: ["deep"]})
def test_no_rank_holds_more_than_its_shards_an_operator_and_a_chunk(rank: int, world_size: int, name: str) -> None:
    """Shards: of parameters after the context, of gradients too after wrapping, of all after the optimizer."""
    facts = _peaks_while_building(name)
    padding = 256 * FP32 * (facts["num_parameters"] + 2)
    room = facts["operator"] + facts["chunk"] + 4096
    shards = facts["numel"] * FP32 // world_size + padding
    assert facts["context peak"] <= shards + room, facts
    assert facts["wrap rest"] <= 2 * shards, facts
    assert facts["wrap peak"] <= facts["wrap rest"] + room, facts
    assert facts["rest"] <= 4 * shards, facts
    assert facts["peak"] <= facts["rest"] + room, facts


def test_building_holds_no_more_than_the_model_an_operator_and_a_chunk() -> None:
    for build in (building.deep, building.top_heavy):
        whole = sum(p.numel() * 4 for p in build().parameters())
        operator = max(sum(p.numel() * 4 for p in module.parameters(recurse=False)) for module in build().modules())
        with LiveStorages() as live:
            with ZeroInitContext():
                module = build()
            model = ShardedModel(module, chunk_size=8192, device="emulated", tensor_placement_policy="cpu")
            optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
            rest = sum(tier.ledger.total_bytes for tier in model.chunk_manager.memory.tiers)
        assert rest >= 4 * whole and optimizer is not None
        assert live.peak_bytes <= rest + operator + 8192 * 4 + 2048


def test_a_cast_at_the_end_of_the_context_holds_one_operator_twice() -> None:
    with LiveStorages() as live, ZeroInitContext(dtype=torch.bfloat16):
        module = building.deep()
    numel, operator = (sum(p.numel() for p in each.parameters()) for each in (module, module[0]))
    padding = 256 * (len(list(module.parameters())) + 2)
    assert live.bytes_now >= 2 * numel
    assert live.peak_bytes <= (numel + 2 * operator + padding) * FP32 + 4096


@on_ranks(2)
def test_a_real_model_is_streamed_from_its_file(rank: int, world_size: int, sentence_encoder: str) -> None:
    facts = _peaks_while_building("pretrained", sentence_encoder)
    room = facts["operator"] + facts["chunk"] + 2 * facts["buffers"] + 65536
    assert facts["numel"] > 20e6
    assert facts["context peak"] <= facts["numel"] * FP32 // world_size + room, facts
    # a chunk's shard is there twice until every rank has it, so that a wrap that fails can give it back
    assert facts["wrap peak"] <= facts["wrap rest"] + room + facts["shard"], facts
    assert facts["peak"] <= facts["rest"] + room, facts
    assert facts["rest"] <= 1.02 * 4 * facts["numel"] * FP32 // world_size, facts


@pytest.mark.parametrize(("home", "num_bytes"), [("device", 288), ("host", 0), ("auto", 0)])
def test_an_accelerator_whose_free_memory_is_unknown_holds_what_it_is_told_to(
    home: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of other makers than NVIDIA. "auto" cannot know how much a half of it is."""
    tier = EmulatedTier()
    monkeypatch.setattr(zero_init, "resolve_device", lambda *_: torch.device("xpu", 0))
    monkeypatch.setattr(zero_init, "choose_tiers", lambda _: (tier, HostTier()))
    monkeypatch.setattr(zero_init, "MemoryMonitor", lambda _: MemoryMonitor("emulated"))  # its free bytes are None
    with ZeroInitContext(home=home):
        module = nn.Linear(8, 8)
    assert (tier.ledger.total_bytes >= num_bytes) if num_bytes else (tier.ledger.total_bytes == 0)
    assert module.weight.shape == (8, 8)
