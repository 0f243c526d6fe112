"""Random programs that build a model in a `ZeroInitContext`: the weights are those of a build without it."""

import random
import tempfile

import pytest
import torch

from gemini import ShardedModel, ZeroInitContext
from tests.harness.on_ranks import in_soak, on_ranks
from tests.zoo.building_walks import Program, assert_same_bits, places

LENGTH = 40


@pytest.mark.filterwarnings("ignore")
@on_ranks(1, 2)
@pytest.mark.parametrize("number", [*range(4), *in_soak(*range(4, 150))])
def test_a_random_program_builds_the_same_model(rank: int, world_size: int, number: int) -> None:
    """Random numbers stay each rank's own; weights are rank 0's, before and after wrapping."""
    chance = random.Random(number)
    torch.manual_seed(number)
    plain = Program(number, LENGTH)
    torch.manual_seed(number + 1000 * rank)
    Program(number, LENGTH)
    random_numbers = torch.get_rng_state()
    torch.manual_seed(number + 1000 * rank)
    strategy, home = (
        chance.choice([None, "tensor", "bucket", "chunk"]),
        chance.choice(["auto", "host", "device", "disk"]),
    )
    disk = {"disk_path": tempfile.gettempdir()} if home == "disk" else {}
    with ZeroInitContext(target_device="emulated", shard_strategy=strategy, home=home, **disk):
        model = Program(number, LENGTH)
    assert model.done == plain.done
    assert torch.equal(torch.get_rng_state(), random_numbers), model.done
    assert places(model) == places(plain), model.done
    for (name, ours), (_, its) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert ours.requires_grad == its.requires_grad, (name, model.done)
        assert_same_bits(ours, its, f"{name}: {model.done}")
    if not rank:  # buffers are each rank's own until the model is wrapped
        for (name, ours), (_, its) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            assert_same_bits(ours, its, f"{name}: {model.done}")
    sharded = ShardedModel(
        model,
        device="emulated",
        stage=chance.choice([0, 1, 2, 3]),
        chunk_size=chance.choice([None, 512, 4096]),
        tensor_placement_policy=chance.choice(["auto", "cpu", "cuda"]),
    )
    state, wanted = sharded.state_dict(), plain.state_dict()
    assert list(state) == list(wanted), model.done
    for name, value in wanted.items():
        assert_same_bits(state[name], value, f"{name} after wrapping: {model.done}")
    sharded.close()
