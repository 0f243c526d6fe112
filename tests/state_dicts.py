"""State dicts taken of the wrapped module itself, and what libraries save with them, on one rank or several."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as checkpoint

from gemini import ShardedModel, ShardedOptimizer, state_hash
from tests import lora
from tests.hf_models import gpt2
from tests.mlp import adam, assert_same, build, train_step, weights_of, wrap
from tests.plain_copies import Parts

HF_CHUNK_NUMEL = 16384
FULL = checkpoint.StateDictOptions(full_state_dict=True)
FULL_ON_CPU = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)


def hugging_face_model() -> nn.Module:
    model: nn.Module = gpt2().model  # type: ignore[union-attr]
    return model


def are_whole(state: Any) -> bool:
    return {(type(value), value.device.type) for value in state.values()} == {(Tensor, "cpu")}


def of_the_module_itself(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """Whole copies of the module, of a part of it and of a plain module around it; loading goes the same ways."""
    model = wrap(make=Parts, **arguments)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer)
    wanted = weights_of(model)
    state = model.module.state_dict()
    assert are_whole(state)
    assert_same(dict(state), wanted)
    assert state["tied.weight"] is state["layers.0.weight"]
    assert state["tied.weight"] is not model.module.state_dict()["tied.weight"], "a copy of its own for every call"
    plain = build(Parts)
    assert state._metadata == plain.state_dict()._metadata == model.state_dict()._metadata
    plain.load_state_dict(state)
    part = model.module.layers[2].state_dict(prefix="a.")
    assert_same(dict(part), {f"a.{name}": wanted[f"layers.2.{name}"] for name in ("weight", "bias")})
    outer = nn.ModuleDict({"trunk": model.module})
    assert_same(dict(outer.state_dict()), {f"trunk.{name}": value for name, value in wanted.items()})
    train_step(model, optimizer, 1)
    assert_same(dict(state), wanted)
    for assign in (False, True):
        train_step(model, optimizer, 2)
        model.module.load_state_dict(wanted, assign=assign)
        assert_same(weights_of(model), wanted)
    model.module.layers[2].load_state_dict({name: value + 1 for name, value in build().layers[3].state_dict().items()})
    assert torch.equal(model.state_dict()["layers.2.bias"], build().layers[3].bias + 1)
    train_step(model, optimizer, 3)  # the parameters are still those that the optimizer has
    model.close()


def fp32_into_16_bits(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """Weights loaded into the wrapped module make masters as those that the model itself loads do."""
    hashes = []
    for through_module in (False, True):
        model = wrap(dtype=torch.bfloat16, **arguments)
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        train_step(model, optimizer, dtype=torch.bfloat16)
        exact = {name: value / 3 for name, value in build().state_dict().items()}
        assert not torch.equal(exact["layers.0.weight"], exact["layers.0.weight"].bfloat16())
        (model.module if through_module else model).load_state_dict(exact)
        masters = optimizer.state_dict()["masters"]
        assert torch.equal(masters[0], exact["layers.0.weight"])
        train_step(model, optimizer, 1, dtype=torch.bfloat16)
        hashes.append(state_hash(model, optimizer))
        model.close()
    assert hashes[0] == hashes[1]


def libraries_save_whole_files(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
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


def checkpoints_of_models(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """torch.distributed.checkpoint.state_dict gets and sets whole models, of the module too."""
    model, other = (wrap(make=Parts, **arguments) for _ in range(2))
    train_step(model, ShardedOptimizer(model, adam(model.parameters())))
    wanted = weights_of(model)
    for target in (model, model.module):
        state = checkpoint.get_model_state_dict(target, options=FULL)
        assert_same(dict(state), wanted)
        assert are_whole(state)
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


def checkpoints_of_optimizers(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
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


def adapters_are_merged_and_unloaded(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
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


CASES = [
    adapters_are_merged_and_unloaded,
    of_the_module_itself,
    fp32_into_16_bits,
    libraries_save_whole_files,
    checkpoints_of_models,
    checkpoints_of_optimizers,
]
