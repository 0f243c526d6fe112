"""Muon by a config, DeepSpeed's and ours, and several optimizers given to an engine."""

from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import ConfigError, UnsupportedError
from gemini.engine.config import load_config
from tests.harness.logged import logged
from tests.harness.on_ranks import on_ranks
from tests.zoo.hf_trainers import gpt2
from tests.zoo.mlp import assert_same, weights_of
from tests.zoo.whole import build, loss_of, muon_and_adam


class Lm(nn.Module):
    """A matrix that embeds, one that is hidden, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 16)
        self.hidden = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.hidden(self.embed(x))))


def lm() -> Lm:
    torch.manual_seed(3)
    return Lm()


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 6,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "adam_lr": 1e-3, "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
}


def by_hand(model: Lm) -> list[torch.optim.Optimizer]:
    rest = [p for p in model.parameters() if p is not model.hidden.weight]
    muon = torch.optim.Muon([model.hidden.weight], lr=0.02, momentum=0.9, weight_decay=0.1)
    return [muon, gemini.HybridAdam(rest, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)]


@on_ranks(1, 2)
@pytest.mark.parametrize("in_context", [False, True])
def test_deepspeeds_muon_is_muon_of_hidden_matrices_beside_adam(rank: int, world_size: int, in_context: bool) -> None:
    """Also of a model of a `ZeroInitContext`, and with states on the host; DeepSpeed's own defaults of Adam."""
    if in_context:
        with gemini.ZeroInitContext():
            module = lm()
    else:
        module = lm()
    engine, *_ = gemini.initialize(model=module, config=CONFIG)
    assert engine.optimizer is not None
    assert [group["optimizer"] for group in engine.optimizer.param_groups] == ["Muon", "HybridAdam"]
    plain = lm()
    optimizers = by_hand(plain)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step()
        loss_of(plain, step).backward()
        gemini.clip_grad_norm_(plain.parameters(), 1.0)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_same(weights_of(engine.model), weights_of(plain))
    assert set(engine.optimizer.state[engine.model.module.hidden.weight]) == {"momentum_buffer"}
    engine.model.close()


@on_ranks(1, 2)
def test_an_engine_takes_several_optimizers_and_a_function_that_makes_them(rank: int, world_size: int) -> None:
    plain = build()
    optimizers = muon_and_adam(plain)
    module = build()
    engines = [
        gemini.initialize(model=module, optimizer=muon_and_adam(module), config={})[0],
        gemini.initialize(model=(again := build()), optimizer=lambda _: muon_and_adam(again), config={})[0],
    ]
    for step in range(2):
        for engine in engines:
            engine.backward(loss_of(engine, step))
            engine.step()
        loss_of(plain, step).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for engine in engines:
        assert_same(weights_of(engine.model), weights_of(plain))
        engine.model.close()


def test_a_schedule_of_a_config_drives_both_and_the_rates_of_each_are_its_own() -> None:
    schedule = {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 2}}
    engine, *_ = gemini.initialize(model=lm(), config={"optimizer": CONFIG["optimizer"], "scheduler": schedule})
    assert engine.optimizer is not None
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 5e-4]
    engine.model.close()


def test_the_defaults_are_those_of_deepspeeds_muon() -> None:
    config = load_config({"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 1}})
    assert config.optimizer is not None
    muon, adam = config.optimizer.make(nn.Linear(2, 2).parameters())
    assert (muon.defaults["lr"], muon.defaults["weight_decay"], muon.defaults["momentum"]) == (0.02, 0.0, 0.95)
    assert (adam.defaults["lr"], adam.defaults["betas"], adam.defaults["eps"]) == (3e-4, (0.9, 0.95), 1e-10)
    ours = load_config({"optimizer": {"type": "muon", "params": {"adjust_lr_fn": "match_rms_adamw"}}})
    assert ours.optimizer is not None
    muon, adam = ours.optimizer.make(nn.Linear(2, 2).parameters())
    assert (muon.defaults["lr"], muon.defaults["adjust_lr_fn"], adam.defaults["lr"]) == (0.02, "match_rms_adamw", 3e-4)


def test_param_groups_are_split_and_keep_their_settings() -> None:
    config = load_config({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}})
    assert config.optimizer is not None
    layer = nn.Linear(2, 2)
    groups = [{"params": [layer.weight, layer.bias], "weight_decay": 0.5, "betas": (0.5, 0.5)}]
    muon, adam = config.optimizer.make(groups)
    assert muon.param_groups[0]["weight_decay"] == adam.param_groups[0]["weight_decay"] == 0.5
    assert adam.param_groups[0]["betas"] == (0.5, 0.5) and "betas" not in muon.param_groups[0]


def test_experts_in_one_tensor_are_muons_and_convolutions_are_refused_by_name() -> None:
    engine, *_ = gemini.initialize(model=build(), config={"optimizer": {"type": "Muon"}})
    assert engine.optimizer is not None
    assert any(engine.model.module.experts is p for p in engine.optimizer.param_groups[0]["params"])
    engine.model.close()
    for net, message in (
        (nn.Conv2d(2, 3, 3), r"weight has 4 dimensions, \(3, 2, 3, 3\), and Muon takes matrices and stacks"),
        (nn.Conv1d(2, 3, 3), r"weight: the weight of a convolution .* into 'adam_names' of params"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            gemini.initialize(model=net, config={"optimizer": {"type": "Muon"}})


def test_embeddings_that_deepspeeds_rule_gives_to_muon_are_named_with_the_key_that_changes_it() -> None:
    """GPT-2's are called "wte" and "wpe". What has the words in its names is not spoken of."""
    with logged() as text:
        engine, *_ = gemini.initialize(model=gpt2(), config={"optimizer": {"type": "Muon"}})
    said = text.getvalue()
    assert "Muon updates transformer.wte.weight, transformer.wpe.weight, which embed" in said
    key = '"adam_names": ["embed", "lm_head", "wte", "wpe"]'
    assert key in said
    assert engine.optimizer is not None
    table = engine.model.module.transformer.wte.weight
    assert any(table is p for p in engine.optimizer.param_groups[0]["params"])
    engine.model.close()

    with logged() as text:
        params = {"adam_names": ["embed", "lm_head", "wte", "wpe"]}
        engine, *_ = gemini.initialize(model=gpt2(), config={"optimizer": {"type": "Muon", "params": params}})
    assert "Muon updates" not in text.getvalue()
    assert engine.optimizer is not None
    names = {p: name for name, p in engine.model.named_parameters()}
    assert {p.ndim for p in engine.optimizer.param_groups[0]["params"]} == {2}
    assert all(".h." in names[p] for p in engine.optimizer.param_groups[0]["params"])
    engine.model.close()
    with pytest.raises(ConfigError, match=r"adam_names must be a list of parts of names.*found 'wte'"):
        load_config({"optimizer": {"type": "Muon", "params": {"adam_names": "wte"}}})


def test_muon_by_head_is_refused() -> None:
    config = {"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError, match=r"optimizer\.params\.per_head_muon"):
        load_config(config)
