"""What a wrapped model shows of its module: names, attributes, modes; and its memory report."""

import inspect

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, state_hash
from tests.zoo.mlp import LAYERS, WIDTH, Mlp, assert_same, build, inputs, sharded, train_step, weights_of, wrap
from tests.zoo.plain_copies import Parts


def test_names_and_state_dict_keys_are_the_plain_modules() -> None:
    model, reference = wrap(make=Parts), build(Parts)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == [
        n for n, _ in reference.named_parameters(remove_duplicate=False)
    ]
    assert [n for n, _ in model.named_parameters("a")] == [n for n, _ in reference.named_parameters("a")]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in reference.named_buffers()]
    assert [p.shape for p in model.parameters()] == [p.shape for p in reference.parameters()]
    assert list(model.state_dict()) == list(reference.state_dict())
    assert list(model.state_dict(prefix="a.")) == list(reference.state_dict(prefix="a."))
    assert_same(weights_of(model), weights_of(reference))
    state = model.state_dict()
    assert state["tied.weight"].data_ptr() == state["layers.0.weight"].data_ptr()


def test_a_hugging_face_model_keeps_its_attributes_and_generates() -> None:
    from tests.zoo.hf_models import gpt2

    def make() -> nn.Module:
        return gpt2().model

    model, reference = wrap(make=make, chunk_size=16384), build(make)
    assert model.config.n_layer == 4
    assert model.config is model.module.config
    assert isinstance(model, nn.Module)
    with pytest.raises(AttributeError, match="no_such_thing"):
        model.no_such_thing  # noqa: B018
    tokens = torch.arange(5).view(1, 5)
    model.eval(), reference.eval()
    wanted, got = (m.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (reference, model))
    assert torch.equal(got, wanted)
    assert model.get_input_embeddings().weight.shape == (256, 64)
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters() == model.num_parameters()
    assert_same(weights_of(model), weights_of(reference))


def test_what_is_set_on_a_wrapped_model_is_what_its_forward_reads() -> None:
    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0
            self.register_buffer("mask", torch.ones(WIDTH))
            self.last = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(super().forward(x)) * self.scale * self.mask  # type: ignore[no-any-return]

    both = wrap(make=Scaled), build(Scaled)
    for model in both:
        model.scale = 3.0
        model.mask = torch.arange(float(WIDTH))
        model.layers = model.layers[:3]
        model.last = nn.Sigmoid()
        model.register_buffer("late", torch.ones(2))
    sharded_model, reference = both
    x = torch.ones(2, WIDTH)
    assert torch.equal(sharded_model(x), reference(x))
    assert sharded_model.scale == sharded_model.module.scale == 3.0
    assert_same(weights_of(sharded_model), weights_of(reference))


def test_an_attribute_error_inside_the_module_is_not_swallowed() -> None:
    class Broken(Mlp):
        @property
        def broken(self) -> int:
            return self.missing_thing  # type: ignore[return-value]

    with pytest.raises(AttributeError, match=r"missing_thing|broken"):
        wrap(make=Broken).broken  # noqa: B018


def test_train_and_eval_reach_the_module() -> None:
    model = wrap()
    assert model.training
    assert model.eval() is model
    assert not any(m.training for m in model.modules())
    assert all(m.training for m in model.train().modules())
    model.apply(lambda m: None)


def test_the_memory_report_tells_what_is_where() -> None:
    model, optimizer = sharded("smallest")
    for step in range(2):
        train_step(model, optimizer, step)
    report = model.memory_report()
    device, host = model.chunk_manager.memory.tiers
    for word in ("device", "host", "slots", "gradient slots", "param", "grad", "optim", "total", "peak"):
        assert word in report, word
    assert "policy auto" in report
    assert f"{LAYERS} chunks" in report
    assert f"{model.observer.num_fetches} fetches" in report
    assert f"{model.observer.counts['evict']} evictions" in report
    assert "host->device" in report
    assert "device->host" in report
    assert device.ledger.peak_bytes <= model.plan.budget_bytes
    assert host.ledger.total_bytes > 0
    before = state_hash(model, optimizer)
    model.memory_report()
    assert state_hash(model, optimizer) == before
    assert "unlimited" in wrap("cuda").memory_report()


def test_forward_has_the_signature_of_the_wrapped_modules() -> None:
    class Named(Mlp):
        def forward(self, input_ids: Tensor, *, labels: Tensor | None = None) -> Tensor:
            return super().forward(input_ids)

    class Own(ShardedModel):
        def forward(self, first: Tensor) -> Tensor:
            return -super().forward(first)

    model = wrap(make=Named)
    assert inspect.signature(model.forward) == inspect.signature(build(Named).forward)
    assert torch.equal(model.forward(input_ids=inputs(0)), build(Named)(inputs(0)))
    own = Own(build(), device="emulated")
    assert list(inspect.signature(own.forward).parameters) == ["first"]
    assert torch.equal(own(inputs(0)), -build()(inputs(0)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("join", "equally many batches"),
        ("register_comm_hook", "reduce_dtype="),
        ("summon_full_params", "gemini.GatheredParameters"),
        ("set_reshard_after_forward", "device_memory="),
        ("set_is_last_backward", "no_sync"),
        ("clip_grad_norm_", "ShardedOptimizer.clip_grad_norm_"),
        ("optim_state_dict", "save_checkpoint"),
    ],
)
def test_a_method_of_torchs_wrappers_says_what_to_use(name: str, words: str) -> None:
    model, _ = sharded()
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=rf"a ShardedModel has no '{name}': .*{words}"):
        getattr(model, name)
    with pytest.raises(AttributeError, match="'Mlp' object has no attribute 'nothing_of_theirs'"):
        _ = model.nothing_of_theirs


def test_the_modules_own_method_of_such_a_name_is_called() -> None:
    class Joins(Mlp):
        def join(self) -> str:
            return "joined"

    assert wrap(make=Joins).join() == "joined"
