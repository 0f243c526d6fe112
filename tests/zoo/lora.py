"""A tiny GPT-2 with LoRA adapters from peft: what every case of it shares, on one rank or several."""

from typing import Any

import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer
from tests.zoo.hf_models import gpt2
from tests.zoo.mlp import adam, assert_same, weights_of

CHUNK_NUMEL = 16384


def make() -> nn.Module:
    """The peft model around the plain one; the same on every call."""
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
        model: nn.Module = peft.get_peft_model(gpt2().model, config)
    return model.train()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def trains_like_plain(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Three steps with the bits of the plain loop; the trunk holds nothing but its weights."""
    import peft

    model = ShardedModel(make(), device="emulated", chunk_size=CHUNK_NUMEL, **wrap)
    reference = make()
    optimizer, its = (adam(p for p in m.parameters() if p.requires_grad) for m in (model, reference))
    wrapped = ShardedOptimizer(model, optimizer)
    before = weights_of(model)
    for step in range(3):
        loss = loss_of(model, step, rank)
        loss.backward()
        wrapped.step()
        for other in range(world_size):
            wanted = loss_of(reference, step, other)
            wanted.backward()
            assert other != rank or torch.equal(loss, wanted)
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad /= world_size
        its.step()
        its.zero_grad()
        assert_same(weights_of(model), weights_of(reference))
    state = model.state_dict()
    assert [name for name in state if not torch.equal(state[name], before[name])] == [n for n in state if "lora_" in n]
    assert list(state) == list(reference.state_dict())
    assert_same(
        peft.get_peft_model_state_dict(model.module, state_dict=state), peft.get_peft_model_state_dict(reference)
    )
    held = {
        kind: sum(tier.ledger.bytes_by_kind[kind] for tier in model.chunk_manager.memory.tiers)
        for kind in ("param", "grad", "optim")
    }
    every = list(reference.parameters())
    frozen, trained = (sum(p.numel() for p in every if p.requires_grad is flag) for flag in (False, True))
    shards = world_size if wrap.get("stage", 3) == 3 else 1
    assert held["param"] >= 4 * (frozen + trained) / shards
    assert held["grad"] + held["optim"] < 4 * frozen / world_size / 2, "the trunk has no gradient and no moments"
    assert held["optim"] >= 8 * trained / world_size
    model.close()
