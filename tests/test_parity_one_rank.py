"""One rank: losses, gradients, norms, weights and moments have the bits of plain PyTorch, whatever the budget.

Each model trains at the smallest budget that is accepted, so that everything which can move does.
"""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from gemini import BudgetError
from tests.harness.pairwise import all_pairs
from tests.harness.reference import Recipe, train_plain
from tests.harness.runs import assert_equal_runs
from tests.harness.sharded import smallest_budget, train_sharded
from tests.zoo.models import MODELS, ModelCase, image_batch, loss_of_outputs

NAMES = [name for name in MODELS if name != "mixed_dtypes"]  # HybridAdam has no fp64; it has a test of its own
BIG = [name for name in NAMES if "big" in MODELS[name].tags]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_at_its_smallest_budget_has_the_bits_of_the_plain_one(name: str) -> None:
    case, recipe = MODELS[name], Recipe(steps=5)
    budget = smallest_budget(case, recipe)
    run, facts = train_sharded(case, recipe, model_data_memory=budget)
    assert_equal_runs(run, dataclasses.replace(train_plain(case, 5), buffers=None))
    assert facts.peak_bytes <= budget
    if "big" in case.tags:
        assert facts.num_chunks >= 8 or facts.num_oversize, "stacked experts make few, large chunks"
        assert facts.num_evictions > 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_in_another_order_of_memory_are_clipped_as_in_the_plain_model(dtype: torch.dtype | None) -> None:
    case = ModelCase(name="channels_last", make=_ChannelsLast, batch=image_batch(edge=8), loss=loss_of_outputs)
    recipe = Recipe(steps=4, dtype=dtype, clip=1e-3, lr=1e-2)
    run, _ = train_sharded(case, recipe)
    plain = train_plain(case, 4, dtype=dtype, clip=1e-3, lr=1e-2)
    assert_equal_runs(run, dataclasses.replace(plain, buffers=None))


class _ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 32, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.layers(images)


def test_the_machinery_is_used_by_the_zoo() -> None:
    """FEATURES' assertions: eviction, refetch into another slot, an operator that spans two chunks."""
    case, recipe = MODELS["gpt2"], Recipe(steps=3)
    _, facts = train_sharded(case, recipe, model_data_memory=smallest_budget(case, recipe))
    assert facts.num_chunks >= 8
    assert facts.num_refetches_elsewhere > 0
    assert facts.spans_two_chunks


def test_one_byte_less_than_the_smallest_budget_is_refused() -> None:
    """By the plan, with what all of the model needs, not by the first piece of memory that finds no room."""
    case, recipe = MODELS["gpt2"], Recipe()
    least = smallest_budget(case, recipe)
    with pytest.raises(BudgetError, match=rf"needs {least} bytes of model data.*model_data_memory") as refused:
        train_sharded(case, recipe, model_data_memory=least - 1)
    assert (refused.value.needed_bytes, refused.value.budget_bytes) == (least, least - 1)


COMBINATIONS = all_pairs(
    {
        "name": ["gpt2", "llama", "bert", "t5", "vit", "mixtral", "nested", "borrowed", "experts", "several_forwards"],
        "policy": ["auto", "cpu", "cuda"],
        "budget": ["smallest", "half", "everything"],
        "strategy": ["tensor", "bucket", "chunk"],
        "stage": [0, 1, 2, 3],
        "chunk_size": [None, 0.5, 1, 3],
        "dtype": [None, torch.bfloat16],
        "accumulation": [1, 3],
        "clip": [None, 0.05],
    },
    allowed=lambda c: c["policy"] == "auto" or c["budget"] == "everything",
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("c", COMBINATIONS, ids=lambda c: "-".join(str(v).replace("torch.", "") for v in c.values()))
def test_every_pair_of_options_has_the_bits_of_plain_pytorch(c: dict[str, object]) -> None:
    case = MODELS[str(c["name"])]
    recipe = Recipe(steps=3, dtype=c["dtype"], accumulation=c["accumulation"], clip=c["clip"])
    factor = c["chunk_size"]
    wrap = {
        "shard_strategy": c["strategy"],
        "stage": c["stage"],
        "chunk_size": None if factor is None else int(case.chunk_numel * factor),
        "tensor_placement_policy": c["policy"],
    }
    if c["budget"] != "everything":
        least = smallest_budget(case, recipe, **wrap)
        state = sum(p.numel() for p in case.build().parameters()) * 16
        wrap["model_data_memory"] = least if c["budget"] == "smallest" else max(least, state // 2)
    run, facts = train_sharded(case, recipe, **wrap)
    wanted = train_plain(case, 3, dtype=c["dtype"], accumulation=c["accumulation"], clip=c["clip"])
    assert_equal_runs(run, dataclasses.replace(wanted, buffers=None))
    assert facts.budget_bytes is None or facts.peak_bytes <= facts.budget_bytes


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_mixed_dtypes_in_one_model_train_as_plain(optimizer: str) -> None:
    """fp32 and fp64 weights have plain PyTorch's bits; bf16 ones have a master here and only come close."""
    case = MODELS["mixed_dtypes"]
    recipe = Recipe(steps=3, optimizer=optimizer)
    run, _ = train_sharded(case, recipe, model_data_memory=smallest_budget(case, recipe))
    wanted = train_plain(case, 3, optimizer=optimizer)
    assert run.losses is not None and wanted.losses is not None
    assert torch.equal(run.losses[0], wanted.losses[0]), "the first loss sees equal weights"
    assert run.weights is not None and wanted.weights is not None
    for name, weight in wanted.weights.items():
        assert run.weights[name].dtype == weight.dtype
        # one bf16 ulp a step is what rounding the weights themselves, rather than a master, may cost
        assert torch.allclose(run.weights[name].double(), weight.double(), rtol=3 * 2**-8, atol=3e-3), name


def test_float64_with_adamw_is_equal_to_plain() -> None:
    for name in ("gpt2", "nested", "tied"):
        case, recipe = MODELS[name], Recipe(steps=5, dtype=torch.float64, optimizer="adamw", clip=0.1)
        run, _ = train_sharded(case, recipe, model_data_memory=smallest_budget(case, recipe))
        wanted = train_plain(case, 5, dtype=torch.float64, optimizer="adamw", clip=0.1)
        # the reported norm is fp32 here, and clipping's own order of summation differs from torch's
        assert_equal_runs(dataclasses.replace(run, norms=None), wanted, bits=False, rtol=1e-9, atol=1e-10)
