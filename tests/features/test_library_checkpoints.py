"""What libraries save of a sharded model is whole: Hugging Face, `torch.distributed.checkpoint.state_dict`, peft."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint

from gemini import ShardedModel, ShardedOptimizer, state_hash
from tests.harness.on_ranks import on_ranks
from tests.zoo import lora, plain_copies
from tests.zoo.hf_models import gpt2
from tests.zoo.mlp import adam, assert_same, build, train_step, weights_of, wrap
from tests.zoo.plain_copies import WRAPS, Parts, everywhere

HF_CHUNK_NUMEL = 16384
FULL = checkpoint.StateDictOptions(full_state_dict=True)
FULL_ON_CPU = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)


def hugging_face_model() -> nn.Module:
    model: nn.Module = gpt2().model  # type: ignore[union-attr]
    return model


@on_ranks(1, 2, timeout_s=90)
@pytest.mark.parametrize("arguments", WRAPS[:1], ids=str)
def test_libraries_save_whole_files(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """`save_pretrained()` of Hugging Face and peft without `state_dict=`; every rank calls it, one writes."""
    import peft

    model = wrap(make=hugging_face_model, chunk_size=HF_CHUNK_NUMEL, **arguments)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, is_main_process=rank == 0)
        if rank == 0:
            loaded = type(model.module).from_pretrained(folder)
            assert loaded.lm_head.weight is loaded.transformer.wte.weight
            assert_same(dict(loaded.state_dict()), dict(build(hugging_face_model).state_dict()))
    model.close()
    adapted: Any = ShardedModel(lora.make(), device="emulated", chunk_size=HF_CHUNK_NUMEL, **arguments)
    reference = lora.make()
    wanted = peft.get_peft_model_state_dict(reference)
    assert_same(peft.get_peft_model_state_dict(adapted.module), wanted)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder, is_main_process=rank == 0)
        if rank == 0:
            assert sorted(path.name for path in Path(folder).iterdir())[0] == "README.md"
            loaded = peft.PeftModel.from_pretrained(hugging_face_model(), folder)
            assert_same(peft.get_peft_model_state_dict(loaded), wanted)
    adapted.close()


@everywhere
def test_torchs_checkpoint_gets_and_sets_whole_models(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """torch.distributed.checkpoint.state_dict gets and sets whole models, of the module too."""
    model, other = (wrap(make=Parts, **arguments) for _ in range(2))
    train_step(model, ShardedOptimizer(model, adam(model.parameters())))
    wanted = weights_of(model)
    for target in (model, model.module):
        state = checkpoint.get_model_state_dict(target, options=FULL)
        assert_same(dict(state), wanted)
        assert plain_copies.are_whole(state)
        saved = checkpoint.get_model_state_dict(target, options=FULL_ON_CPU)
        assert_same(dict(saved), wanted if rank == 0 else {})
    for target in (other, other.module):
        checkpoint.set_model_state_dict(target, {name: value + 1 for name, value in wanted.items()}, options=FULL)
        checkpoint.set_model_state_dict(target, dict(wanted), options=FULL)
        assert_same(weights_of(other), wanted)
    if world_size > 1:
        train_step(other, ShardedOptimizer(other, adam(other.parameters())))
        from_rank_0 = checkpoint.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        checkpoint.set_model_state_dict(other, dict(wanted) if rank == 0 else {}, options=from_rank_0)
        assert_same(weights_of(other), wanted)
    for each in (model, other):
        each.close()


@everywhere
def test_torchs_checkpoint_gets_and_sets_whole_optimizers(
    rank: int, world_size: int, arguments: dict[str, Any]
) -> None:
    """What torch.distributed.checkpoint.state_dict gets of a trained pair makes a new pair go on with the same bits."""

    def pair() -> tuple[ShardedModel, ShardedOptimizer]:
        made = wrap(**arguments)
        return made, ShardedOptimizer(made, adam(made.parameters()))

    model, optimizer = pair()
    for step in range(2):
        train_step(model, optimizer, step)
    before = state_hash(model, optimizer)
    weights, states = checkpoint.get_state_dict(model, optimizer, options=FULL)
    assert_same(dict(weights), weights_of(model))
    whole = optimizer.state_dict()["state"]
    assert torch.equal(states["state"]["layers.0.weight"]["exp_avg"], whole[0]["exp_avg"])
    of_module = checkpoint.get_optimizer_state_dict(model.module, optimizer, options=FULL)
    assert list(of_module["state"]) == list(states["state"])
    assert state_hash(model, optimizer) == before, "getting a state changes nothing"
    other, other_optimizer = pair()
    checkpoint.set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=states, options=FULL)
    assert state_hash(other, other_optimizer) == before
    for each in ((model, optimizer), (other, other_optimizer)):
        train_step(*each, 2)
    assert state_hash(other, other_optimizer) == state_hash(model, optimizer)
    for closing in (model, other):
        closing.close()


@everywhere
def test_adapters_are_merged_and_unloaded(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """peft merges into the sharded weights, of which some are tied: what is left computes and is saved as plain."""
    reference: Any = lora.make()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    model: Any = ShardedModel(lora.make(), device="emulated", chunk_size=HF_CHUNK_NUMEL, **arguments)
    model.load_state_dict(reference.state_dict())
    merged, wanted = model.merge_and_unload(), reference.merge_and_unload()
    assert merged.config.tie_word_embeddings is wanted.config.tie_word_embeddings is True
    assert_same(dict(merged.state_dict()), dict(wanted.state_dict()))
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        assert torch.equal(merged(input_ids=ids).logits, wanted(input_ids=ids).logits)
    with tempfile.TemporaryDirectory() as folder:
        merged.save_pretrained(folder, is_main_process=rank == 0)
        if rank == 0:
            assert_same(dict(type(merged).from_pretrained(folder).state_dict()), dict(wanted.state_dict()))
    model.close()


def test_masters_are_in_our_optimizer_state_dict_and_not_in_that_of_torchs_checkpoint() -> None:
    model = wrap(dtype=torch.bfloat16)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer, dtype=torch.bfloat16)
    states = checkpoint.get_optimizer_state_dict(model, optimizer, options=FULL)
    assert "masters" not in states
    assert optimizer.state_dict()["masters"]


@on_ranks(1, 2)
def test_a_flattened_state_of_an_optimizer_comes_back(rank: int, world_size: int) -> None:
    """As `get_optimizer_state_dict` flattens it for torch's checkpoints: a tensor for each name and state."""
    flat_options = checkpoint.StateDictOptions(flatten_optimizer_state_dict=True)
    model = wrap("cpu")
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer, rank)
    flat = checkpoint.get_optimizer_state_dict(model, optimizer, options=flat_options)
    wanted = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    for number, name in enumerate(names):
        assert torch.equal(flat[f"state.{name}.exp_avg"], wanted[number]["exp_avg"])
        assert flat[f"param_groups.{name}.lr"] == optimizer.param_groups[0]["lr"]
    before = state_hash(optimizer)
    train_step(model, optimizer, rank)
    assert state_hash(optimizer) != before
    checkpoint.set_optimizer_state_dict(model, optimizer, flat, options=flat_options)
    assert state_hash(optimizer) == before
    model.close()
