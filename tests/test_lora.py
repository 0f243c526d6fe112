"""LoRA through peft, and embeddings that change their size, on one rank."""

from typing import Any

import pytest
import torch

from gemini import ReleasedParameterError, ShardedModel, ShardedOptimizer, state_hash
from tests.zoo import lora, mlp
from tests.zoo.hf_models import gpt2

WRAPS: list[dict[str, Any]] = [{"tensor_placement_policy": policy} for policy in ("cuda", "cpu")]
WRAPS += [{"model_data_memory": "700KiB"}]


@pytest.mark.parametrize("wrap", WRAPS, ids=str)
def test_adapters_train_as_on_the_plain_model(wrap: dict[str, Any]) -> None:
    lora.trains_like_plain(0, 1, wrap)


def _resized() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: Any = gpt2().model  # type: ignore[union-attr]
        module.resize_token_embeddings(300)
    return module


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
