"""A second dimension of the mesh for sequences: ranks with other tokens share shards with ranks of other sequences.

The attention is that of Ulysses: an all-to-all gives each rank some heads of the whole sequence, and another one takes
them back. Which mean is right is in docs/parallelism.md. fp64, as a different order of sums stays below 1e-9 there.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single

import gemini
from gemini import ConfigError, ShardedModel, ShardedOptimizer, UnsupportedError
from gemini.deepspeed import initialize
from optim import clip_coefficient
from tests.harness.on_ranks import in_soak, on_ranks
from tests.harness.seed import seed
from tests.zoo import mlp

WIDTH, HEADS, TOKENS, WORDS = 16, 4, 8, 20
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


class Ulysses(nn.Module):
    """Attention over a sequence of which each rank of `group` has some tokens. Without a group it has all of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        heads = (self.exchanged(each, split=1, join=2) for each in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        own = self.exchanged(attended, split=2, join=1)
        return self.out(own.transpose(1, 2).flatten(-2))

    def exchanged(self, x: Tensor, split: int, join: int) -> Tensor:
        """Of (batch, heads, tokens, width) give away one dimension's parts, and get another one's."""
        if self.group is None:
            return x
        parts = torch.stack(x.chunk(self.group.size(), split)).contiguous()
        received = all_to_all_single(torch.empty_like(parts), parts, group=self.group)
        return torch.cat(tuple(received), join)


class Net(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Ulysses(group) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        x = self.embed(words) + self.positions(places)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(group: dist.ProcessGroup | None) -> Net:
    with torch.random.fork_rng(devices=[]):
        seed(0)
        return Net(group).double()


def loss_of(model: nn.Module, step: int, data_rank: int, place: int = 0, of: int = 1) -> Tensor:
    """The mean over the tokens of one rank: the `place`-th of `of` parts of a sequence."""
    words = torch.randint(0, WORDS, (2, TOKENS + 1), generator=torch.Generator().manual_seed(10 * step + data_rank))
    own = torch.arange(TOKENS).chunk(of)[place]
    return nn.functional.cross_entropy(model(words[:, own], own).flatten(0, 1), words[:, own + 1].flatten())


def adam(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain(data_ranks: int, clip: float) -> tuple[list[float], dict[str, Tensor]]:
    model = build(None)
    optimizer, norms = adam(model.parameters()), []
    for step in range(3):
        for data_rank in range(data_ranks):
            (loss_of(model, step, data_rank) / data_ranks).backward()
        norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])))  # type: ignore[misc]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(clip_coefficient(norms[-1], clip))
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(model.state_dict())


@on_ranks(4, timeout_s=120)
@pytest.mark.parametrize("stage", [3, *in_soak(0, 1, 2)])
@pytest.mark.parametrize("names", [("dp", "sp"), *in_soak(("dp_replicate", "cp"))], ids="-".join)
def test_two_sequence_ranks_of_two_data_ranks_equal_plain(
    rank: int, world_size: int, names: tuple[str, str], stage: int
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    group, place, data_rank = mesh[names[1]].get_group(), mesh[names[1]].get_local_rank(), mesh.get_local_rank(names[0])
    norms, weights = plain(2, 0.5)
    options: dict[str, Any] = {"stage": stage, "tensor_placement_policy": "cpu", "chunk_size": 512}
    # "dp_replicate" says that ranks of other sequences hold replicas; all others share the shards.
    model = ShardedModel(build(group), device_mesh=mesh, device="emulated", **options)
    assert len(model.chunk_manager.communicator.rows) == (2 if "replicate" in names[0] else 1)
    assert model.world_size == 4
    optimizer = ShardedOptimizer(model, adam(model.parameters()), clip_grad_norm=0.5)
    for step in range(3):
        optimizer.backward(loss_of(model, step, data_rank, place, 2))
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(float(optimizer.grad_norm), norms[step], rtol=1e-6, atol=0.0)  # it is in fp32
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], **CLOSE)
    model.close()


@on_ranks(4)
def test_a_mean_over_the_whole_sequence_is_right_as_the_page_says(rank: int, world_size: int) -> None:
    """Each rank's loss is the sum over its own tokens, as a part of the mean over the sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    place, data_rank = mesh["sp"].get_local_rank(), mesh["dp"].get_local_rank()
    wanted = build(None)
    for each in range(2):
        (loss_of(wanted, 0, each) / 2).backward()
    model = ShardedModel(build(mesh["sp"].get_group()), device="emulated")  # no mesh: all ranks share the shards
    part = loss_of(model, 0, data_rank, place, 2) / 2  # the sum over own tokens / all tokens of the sequence
    (2 * part).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.clone(), wanted.get_parameter(name).grad, **CLOSE)
    model.close()


@on_ranks(1)
def test_what_other_libraries_call_it_is_refused_with_what_to_do(rank: int, world_size: int) -> None:
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    for more, words in (
        ({"sequence_parallel_size": 2}, "leave it out: ranks with other tokens.* sums over .* multiply the loss"),
        ({"tensor_parallel": {"autotp_size": 2}}, r"parallelize_module.*initialize\(device_mesh=mesh\['dp'\]\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            gemini.initialize(mlp.build(), config={**config, **more}, verbose=False)
    with pytest.raises(ConfigError, match=r"mesh_param: leave it out for data and sequence ranks.* multiply the loss"):
        initialize(model=mlp.build(), config=config, mesh_param=(1, 2), dist_init_required=False)
    engine, *_ = initialize(model=mlp.build(), config=config, mesh_param=(1, 1), dist_init_required=False)
    assert engine.dp_world_size == 1


@on_ranks(4)
def test_dimensions_that_say_nothing_known_are_refused(rank: int, world_size: int) -> None:
    for shape, names, words in (
        ((2, 2), ("sp", "heads"), "unknown dimensions 'heads'"),
        ((2, 2), ("tp", "pp"), "no dimension for data"),
        ((2, 1, 2), ("dp", "dp_replicate", "sp"), "must have dp_replicate before"),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(UnsupportedError, match=words):
            ShardedModel(mlp.build(), device="emulated", device_mesh=mesh)
