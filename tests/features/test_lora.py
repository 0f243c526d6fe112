"""LoRA through peft, and embeddings that change their size."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import (
    BudgetError,
    ReleasedParameterError,
    ShardedModel,
    ShardedOptimizer,
    SlotError,
    UnsupportedError,
    state_hash,
)
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import lora, mlp
from tests.zoo.hf_models import gpt2

WRAPS: list[dict[str, Any]] = [{"tensor_placement_policy": policy} for policy in ("cuda", "cpu")]
WRAPS += [{"model_data_memory": "700KiB"}]


@pytest.mark.sampled(2)
@on_ranks_with("wrap", {1: WRAPS, 2: [{}, {"stage": 2, "tensor_placement_policy": "cpu"}]})
def test_adapters_train_as_on_the_plain_model(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Three steps with the bits of the plain loop; the trunk holds nothing but its weights."""
    import peft

    model = ShardedModel(lora.make(), device="emulated", chunk_size=lora.CHUNK_NUMEL, **wrap)
    reference = lora.make()
    optimizer, its = (mlp.adam(p for p in m.parameters() if p.requires_grad) for m in (model, reference))
    wrapped = ShardedOptimizer(model, optimizer)
    before = mlp.weights_of(model)

    def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
        return lora.loss_of(module, step, rank)

    mlp.train_beside_plain(model, wrapped, reference, its, loss_of, rank, world_size, 3)
    state = model.state_dict()
    assert [name for name in state if not torch.equal(state[name], before[name])] == [n for n in state if "lora_" in n]
    assert list(state) == list(reference.state_dict())
    mlp.assert_same(
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


def _resized() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: Any = gpt2().model  # type: ignore[union-attr]
        module.resize_token_embeddings(300)
    return module


@pytest.mark.parametrize("kind", ["lora", "prompt", "the module inside"])
def test_adapters_on_a_model_that_is_sharded_already_are_refused_before_anything_changes(kind: str) -> None:
    import peft

    model = ShardedModel(gpt2(), device="emulated")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    config: Any = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    if kind == "prompt":
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedError, match=r"ShardedModel\(peft\.get_peft_model\(module, config\)\)"):
        peft.get_peft_model(model.module if kind == "the module inside" else model, config)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == names


def test_an_embedding_changes_its_size_before_wrapping_and_after_by_way_of_the_plain_module() -> None:
    def wrapped(module: Any) -> tuple[Any, ...]:
        model = ShardedModel(module, device="emulated")
        return model, ShardedOptimizer(model, mlp.adam(model.parameters())), mlp.adam(reference.parameters())

    def steps(*numbers: int) -> None:
        for step in numbers:
            for m, o in ((model, optimizer), (reference, its)):
                lora.loss_of(m, step, 0).backward()
                o.step()
                o.zero_grad()
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))

    reference = _resized()
    model, optimizer, its = wrapped(_resized())
    steps(0, 1)
    before = state_hash(model, optimizer)
    for size in (320, 280):
        with pytest.raises(ReleasedParameterError, match=r"'transformer\.wte\.weight' .* into the plain module"):
            model.resize_token_embeddings(size, mean_resizing=False)
    assert state_hash(model, optimizer) == before
    steps(2)
    plain = _resized()  # the way that the error names
    plain.load_state_dict(model.state_dict())
    for module in (plain, reference):
        module.resize_token_embeddings(280)
    model, optimizer, its = wrapped(plain)
    assert model.state_dict()["transformer.wte.weight"].shape[0] == 280
    steps(3, 4)


def adapters_on_experts() -> nn.Module:
    """A mixture of experts in parameters of three dimensions, with adapters on these, as peft makes them."""
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=64, **sizes, **heads))
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def train_adapters(model: Any) -> None:
    rows = torch.arange(18).view(2, 9) + 3
    wrapped = isinstance(model, ShardedModel)
    optimizer: Any = mlp.adam(p for p in model.parameters() if p.requires_grad)
    if wrapped:
        optimizer = ShardedOptimizer(model, optimizer)
    for _ in range(2):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def merge_adapters(model: Any) -> None:
    (model.module if isinstance(model, ShardedModel) else model).merge_adapter()


@on_ranks(1, soak=(2,))
@pytest.mark.parametrize("use", [train_adapters, merge_adapters])
def test_the_message_about_views_that_peft_keeps_names_what_lets_adapters_on_experts_work(
    rank: int, world_size: int, use: Callable[[Any], None]
) -> None:
    """At the least budget peft keeps views of adapters in slots that experts need, unless these stay on the device."""
    plain = adapters_on_experts()
    module, threshold = copy.deepcopy(plain), 0
    use(plain)
    for _ in range(4):
        wrap: dict[str, Any] = {"device": "emulated", "param_persistence_threshold": threshold}
        with pytest.raises(BudgetError) as refused:
            ShardedModel(copy.deepcopy(module), model_data_memory=64, **wrap)
        model = ShardedModel(copy.deepcopy(module), model_data_memory=refused.value.needed_bytes, **wrap)
        try:
            use(model)
            break
        except SlotError as error:
            (named,) = re.findall(r"param_persistence_threshold=(\d+)", str(error))
            threshold = int(named)
            model.close()
    assert 0 < threshold <= 513, "the larger adapters have 512 elements"
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
    model.close()
