"""Tensor parallelism: parameters that are `DTensor`s of one mesh dimension, sharded by ZeRO along another one."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gemini
from gemini import (
    DivergenceError,
    HybridAdam,
    RankLostError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    clip_grad_norm_,
    load_checkpoint,
    save_checkpoint,
    state_hash,
)
from gemini.checkpoint.contents import Contents
from gemini.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.harness.meshes import kept_mesh
from tests.harness.on_ranks import gathered, in_soak, on_ranks
from tests.harness.ranks import RankPool
from tests.zoo import divided
from tests.zoo.divided import CLOSE

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 1024


def wrap(mesh: DeviceMesh | None, net: nn.Module, clip: float | None = None, make: Any = None, **wrap: Any) -> Any:
    model = ShardedModel(net, device_mesh=mesh, **{"chunk_size": CHUNK, "device": "emulated", **wrap})
    return model, ShardedOptimizer(model, (make or divided.adam)(model.parameters()), clip_grad_norm=clip)


def hybrid(parameters: Iterable[nn.Parameter]) -> HybridAdam:
    return HybridAdam(parameters, lr=1e-2, eps=1e-4)


def train(
    model: ShardedModel, optimizer: ShardedOptimizer, data_rank: int, steps: int = 3, micro_batches: int = 1
) -> list[float]:
    norms = []
    for step in range(steps):
        for micro in range(micro_batches):
            optimizer.backward(divided.loss_of(model, 10 * step + micro, data_rank))
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    return norms


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **CLOSE, msg=lambda words, name=name: f"{name}: {words}")


PLACES: dict[str, dict[str, Any]] = {
    "gathered from the host": {"tensor_placement_policy": "cpu", "max_prefetch": 2},
    "stage 2, all on the device": {"stage": 2},
    "stage 0, deferred": {"stage": 0, "tensor_placement_policy": "cpu", "deferred_update": True},
    "small budget": {"model_data_memory": "96KB"},
    "in the backward": {"tensor_placement_policy": "cpu", "update_in_backward": True},
    "disk": {"tensor_placement_policy": "disk"},
}


@on_ranks(4, timeout_s=120)
def test_two_parts_of_two_shards_equal_plain(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, 2)
    norms, weights, states = divided.plain_training(2, micro_batches=2, clip=0.5)
    model, optimizer = wrap(mesh["dp"], divided.divided(mesh["tp"]), 0.5, tensor_placement_policy="cpu")
    found = train(model, optimizer, mesh["dp"].get_local_rank(), micro_batches=2)
    # `grad_norm` is in fp32.
    torch.testing.assert_close(torch.tensor(found), torch.tensor(norms))
    assert_close(dict(model.state_dict()), weights)
    for number, its in optimizer.state_dict()["state"].items():
        assert_close(its, states[number])
    # Each rank has a half of what is divided, and of that a shard.
    assert model.module.head.weight.shape == (divided.WORDS // 2, divided.WIDTH)
    assert {chunk.layout.world_size for chunk in model.chunk_manager.chunks} == {2}


@on_ranks(4, timeout_s=240)
@pytest.mark.parametrize("sequence", [False, *in_soak(True)], ids=["whole sequences", "sequence parallel"])
@pytest.mark.parametrize("shape", [(2, 2), *in_soak((1, 4), (4, 1))], ids=str)
def test_parts_have_the_same_bits_wherever_they_rest(
    rank: int, world_size: int, shape: tuple[int, int], sequence: bool
) -> None:
    mesh = kept_mesh(*shape)
    single = {"dtype": torch.float32, "make": hybrid}
    norms, weights, _ = divided.plain_training(shape[0], steps=2, **single)
    found = {}
    for title, place in PLACES.items():
        with TemporaryDirectory() as folder:
            where = {"disk_path": folder} if "disk" in title else {}
            net = divided.divided(mesh["tp"], divided.build(torch.float32), sequence)
            model, optimizer = wrap(mesh["dp"], net, make=hybrid, **place, **where)
            its_norms = train(model, optimizer, mesh["dp"].get_local_rank(), steps=2)
            torch.testing.assert_close(torch.tensor(its_norms), torch.tensor(norms))
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)
            found[title] = state_hash(model), state_hash(optimizer)
            model.close()
    assert len(set(found.values())) == 1, found


@on_ranks(4)
def test_an_odd_width_is_divided_unevenly(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, 2)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 7), nn.Linear(7, 13)

        def forward(self, words: Any) -> Any:
            return self.head(self.embed(words))

    def built() -> Odd:
        torch.manual_seed(0)
        return Odd().double()

    net = built()
    for module in (net.embed, net.head):
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["tp"], [Shard(0)])))
    net.embed.register_forward_hook(lambda module, args, out: out.full_tensor())
    net.embed.register_forward_pre_hook(lambda module, args: (_replicated(args[0], mesh["tp"]),))
    net.head.register_forward_pre_hook(lambda module, args: (_replicated(args[0], mesh["tp"]),))
    net.head.register_forward_hook(lambda module, args, out: out.full_tensor())
    words = torch.arange(26).view(2, 13) % 13
    model, optimizer = wrap(mesh["dp"], net, tensor_placement_policy="cpu", chunk_size=256)
    assert len(set(gathered(sum(p.numel() for p in model.parameters())))) == 2
    plain = built()
    plain_optimizer = divided.adam(plain.parameters())
    for _ in range(2):
        for each, its in ((model, optimizer), (plain, plain_optimizer)):
            each(words).square().mean().backward()
            its.step()
            its.zero_grad()
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    assert_close(optimizer.state_dict()["state"][0], plain_optimizer.state_dict()["state"][0])


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    # As of every input that all parts see alike: their gradients of it are parts of one sum.
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


@on_ranks(4)
def test_an_overflow_in_one_part_skips_the_step_in_all(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, 2)
    net = divided.divided(mesh["tp"], divided.build(torch.float16))
    model = ShardedModel(net, device_mesh=mesh["dp"], device="emulated")
    optimizer = ShardedOptimizer(model, hybrid(model.parameters()), initial_scale=2.0**8, hysteresis=1)
    before = state_hash(model)
    optimizer.backward(divided.loss_of(model, 0, 0).float())
    if rank == 3:  # its part of one weight alone
        weight = model.module.blocks[2].up.weight
        weight.grad *= float("inf")
    elif rank == 1:  # the other shard of the same part, as a collective write
        model.module.blocks[2].up.weight.grad *= float("inf")
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.skipped is not None
    assert (optimizer.loss_scale, state_hash(model)) == (2.0**7, before)
    assert ("other ranks" in optimizer.last_step.skipped) == (mesh["tp"].get_local_rank() == 0)


@on_ranks(4)
def test_another_norm_is_that_of_all_parts(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, 2)
    model, optimizer = wrap(mesh["dp"], divided.divided(mesh["tp"]))
    plain = divided.build()
    for data_rank in range(2):
        (divided.loss_of(plain, 0, data_rank) / 2).backward()
    optimizer.backward(divided.loss_of(model, 0, mesh["dp"].get_local_rank()))
    largest = max(float(each.grad.abs().max()) for each in plain.parameters() if each.grad is not None)
    assert float(optimizer.clip_grad_norm_(0.1, norm_type=float("inf"))) == pytest.approx(largest, rel=1e-6)
    optimizer.step()


# -- State dicts have wholes, and take wholes or DTensors.


@on_ranks(4)
def test_state_dicts_have_wholes_and_load_wholes_and_dtensors(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, 2)
    model, optimizer = wrap(mesh["dp"], divided.divided(mesh["tp"]), tensor_placement_policy="cpu")
    train(model, optimizer, 0, steps=1)
    weights, states = dict(model.state_dict()), optimizer.state_dict()
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in divided.build().state_dict().items()
    }
    assert bool(model.state_dict(rank0_only=True)) == bool(optimizer.state_dict(rank0_only=True)) == (rank == 0)
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, weights[name]), name
    before = state_hash(model), state_hash(optimizer)
    dtensors = {
        name: distribute_tensor(value, mesh["tp"], [Shard(0) if value.dim() == 2 else Replicate()])
        for name, value in weights.items()
    }
    for loads in (model.load_state_dict, model.module.load_state_dict):
        for form in (weights, dtensors):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            loads(form)
            optimizer.load_state_dict(states)
            assert (state_hash(model), state_hash(optimizer)) == before
    with pytest.raises(RuntimeError, match=r"head.weight has shape .15, 16., the model has .30, 16."):
        model.load_state_dict({**weights, "head.weight": weights["head.weight"][:15]})
    with pytest.raises(UnsupportedError, match=r"Load model.state_dict"):
        __import__("copy").deepcopy(model)


@on_ranks(4)
def test_full_states_are_whole_over_all_parts_and_local_ones_are_not(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, 2)
    plain = divided.build()
    for data_rank in range(2):
        (divided.loss_of(plain, 0, data_rank) / 2).backward()
    model, optimizer = wrap(mesh["dp"], divided.divided(mesh["tp"]), tensor_placement_policy="cpu")
    optimizer.backward(divided.loss_of(model, 0, mesh["dp"].get_local_rank()))
    for name in ("embed.weight", "blocks.0.down.weight", "blocks.2.norm.bias"):
        parameter, wanted = model.get_parameter(name), plain.get_parameter(name)
        torch.testing.assert_close(safe_get_full_grad(parameter), wanted.grad, **CLOSE)
        own = parameter.grad
        assert own is not None and own.shape == parameter.shape
        # Rank 0's counts, also for ranks with other parts.
        safe_set_full_grad(parameter, torch.full(wanted.shape, 1.0 + rank))
        assert torch.equal(safe_get_full_grad(parameter), torch.ones_like(wanted))
    optimizer.step()
    weight, state = model.get_parameter("head.weight"), optimizer.state_dict()["state"]
    number = [each for each, _ in model.named_parameters()].index("head.weight")
    assert torch.equal(safe_get_full_fp32_param(weight), model.state_dict()["head.weight"])
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), state[number]["exp_avg"])
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape == (divided.WORDS // 2, divided.WIDTH)
    value = torch.randn(divided.WORDS, divided.WIDTH, generator=torch.Generator().manual_seed(rank)).double()
    first = gathered(value)[0]
    safe_set_full_fp32_param(weight, value)
    safe_set_full_optimizer_state(weight, 2 * value, "exp_avg")
    assert torch.equal(model.state_dict()["head.weight"], first)
    assert torch.equal(optimizer.state_dict()["state"][number]["exp_avg"], 2 * first)
    with pytest.raises(ValueError, match=r"must be a tensor of shape \(30, 16\), found \(15, 16\)"):
        safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
    model.close()


# -- Checkpoints move between meshes.


def saved(rank: int, world_size: int, folder: str, shape: list[int] | None, source: str | None) -> list[Any]:
    """Goes on from the checkpoint `source`, or begins; then saves. Returns the hash of whole states after loading."""
    if shape is None:
        mesh, net, data_rank = None, divided.build(), rank
    else:
        whole = kept_mesh(*shape)
        mesh, net, data_rank = whole["dp"], divided.divided(whole["tp"]), whole["dp"].get_local_rank()
    model, optimizer = wrap(mesh, net, 0.5, tensor_placement_policy="cpu", stage=3 if shape else 1)
    if source is None:
        train(model, optimizer, data_rank, steps=2)
        # The gradients of an open window are saved, too.
        optimizer.backward(divided.loss_of(model, 30, data_rank))
    else:
        load_checkpoint(source, model, optimizer)
    found = [dict(model.state_dict()), optimizer.state_dict()["state"]]
    save_checkpoint(folder, model, optimizer, asynchronous=True).wait()
    optimizer.backward(divided.loss_of(model, 31, 0))
    optimizer.step()
    found.append(float(optimizer.grad_norm))
    model.close()
    return found


def test_a_checkpoint_moves_to_another_mesh(ranks: RankPool, tmp_path: Path) -> None:
    def run(world_size: int, name: str, shape: list[int] | None, source: str | None) -> Any:
        place = None if source is None else str(tmp_path / source)
        found = ranks(world_size).run(saved, str(tmp_path / name), shape, place, timeout_s=120)
        return found[0]

    weights, states, norm = run(4, "2 x 2", [2, 2], None)
    for world_size, name, shape, source in (
        (4, "4", None, "2 x 2"),
        (2, "1 x 2", [1, 2], "4"),
        (1, "1", None, "1 x 2"),
        (4, "2 x 2 again", [2, 2], "1"),
    ):
        its_weights, its_states, its_norm = run(world_size, name, shape, source)
        for key, value in weights.items():
            assert torch.equal(its_weights[key], value), (name, key)
        for number, its in states.items():
            assert all(torch.equal(its_states[number][key], value) for key, value in its.items()), (name, number)
        assert its_norm == pytest.approx(norm, rel=1e-6), name
    # What all parts have copies of is written once.
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name).rglob("states-*")) for name in ("2 x 2 again", "1")
    }
    assert sizes["2 x 2 again"] < 1.1 * sizes["1"] + 40_000, sizes


# -- What is refused.


@contextmanager
def refused(words: str) -> Iterator[None]:
    with pytest.raises(UnsupportedError, match=words):
        yield


@on_ranks(4)
def test_what_cannot_be_divided_so_is_refused_and_changes_nothing(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, 2)
    net = divided.divided(mesh["tp"])
    before = {name: value.to_local().clone() for name, value in net.state_dict().items() if isinstance(value, DTensor)}
    for options in ({}, {"device_mesh": mesh["tp"]}, {"device_mesh": kept_mesh(2, 2, names=("replicate", "shard"))}):
        with refused("is a DTensor over ranks .* share the shards of this model.* device_mesh=mesh.'dp'.* fully_shard"):
            ShardedModel(net, device="emulated", **options)
    sums = divided.build()
    sums.head.weight = nn.Parameter(DTensor.from_local(sums.head.weight.detach(), mesh["tp"], [Partial()]))
    with refused("'head.weight' is a DTensor with placement Partial.*redistribute"):
        ShardedModel(sums, device_mesh=mesh["dp"], device="emulated")
    two = divided.divided(mesh["tp"])
    alone = kept_mesh(2, 2, names=("a", "b"))
    with refused("'unused.weight' is a DTensor over ranks .* one dimension"):
        two.unused.weight = nn.Parameter(
            distribute_tensor(torch.zeros(4, 4), DeviceMesh("cpu", torch.arange(4).view(4, 1)[rank]))
        )
        ShardedModel(two, device_mesh=mesh["dp"], device="emulated")
    buffered = divided.divided(mesh["tp"])
    buffered.register_buffer("scale", distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
    with refused("buffer 'scale' is a DTensor"):
        ShardedModel(buffered, device_mesh=mesh["dp"], device="emulated")
    # Seeds that differ along the dimension that divides tensors make other copies of what is not divided.
    other = divided.divided(mesh["tp"])
    with torch.no_grad():
        other.blocks[1].norm.bias.fill_(mesh["tp"].get_local_rank())
    with pytest.raises(DivergenceError, match=r"'blocks.1.norm.bias' is no DTensor and has other values"):
        ShardedModel(other, device_mesh=mesh["dp"], device="emulated")
    for name, value in net.state_dict().items():
        if isinstance(value, DTensor):
            assert torch.equal(value.to_local(), before[name]), name
    with refused("unknown dimensions 'b'.*known names are"):
        ShardedModel(net, device_mesh=kept_mesh(2, 2, names=("tp", "b")), device="emulated")
    assert alone.ndim == 2 and dist.is_initialized()
    # After all of that it trains.
    model, optimizer = wrap(mesh["dp"], net)
    train(model, optimizer, 0, steps=1)
    optimizer.close()
    with refused("is divided by tensor parallelism, and its optimizer takes whole tensors"):
        ShardedOptimizer(model, torch.optim.Muon([each for each in model.parameters() if each.dim() == 2]))


@on_ranks(2)
def test_a_divided_weight_used_elsewhere_is_refused(rank: int, world_size: int) -> None:
    mesh = kept_mesh(1, 2)

    class Tied(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, words: Any) -> Any:
            return nn.functional.linear(self.inner(words), self.inner.head.weight)

    net = Tied(divided.divided(mesh["tp"]))
    model, _ = wrap(mesh["dp"], net, tensor_placement_policy="cpu")
    with refused("'inner.head.weight' is divided by tensor parallelism and used outside of the module that has it"):
        model.module.inner.head.weight.norm()  # a penalty in a loss would be that of a part
    with torch.no_grad():
        assert model.module.inner.head.weight.clone().shape == (15, 16)
    with refused("'inner.head.weight' is divided by tensor parallelism and used outside of the module that has it"):
        model(divided.batch(0, 0))
    model.close()


@on_ranks(4)
def test_an_engine_takes_the_whole_mesh_and_an_optimizer_from_before(rank: int, world_size: int) -> None:
    mesh = kept_mesh(2, 2)
    hashes = []
    for is_given in (True, False):
        net = divided.divided(mesh["tp"], divided.build(torch.float32))
        config: dict[str, Any] = {"stage": 3, "train_batch_size": 8, "clip_grad_norm": 0.5}
        optimizer = hybrid(net.parameters()) if is_given else hybrid
        engine, *_ = gemini.initialize(net, optimizer=optimizer, config=config, device_mesh=mesh, verbose=False)
        assert engine.batch_sizes.micro == 4  # over the ranks with other data alone
        for step in range(2):
            engine.backward(divided.loss_of(engine, step, mesh["dp"].get_local_rank()))
            engine.step()
        hashes.append(state_hash(engine.model, engine.optimizer))
        engine.model.close()
    assert hashes[0] == hashes[1]


# -- A rank that fails.


def small(mesh: DeviceMesh) -> tuple[ShardedModel, ShardedOptimizer]:
    net = divided.divided(mesh["tp"], divided.build(torch.float32))
    return wrap(mesh["dp"], net, make=hybrid, tensor_placement_policy="cpu", rank_timeout=50)


@on_ranks(4, timeout_s=40)
@pytest.mark.parametrize("shape", [(2, 2), *in_soak((1, 4))], ids=str)
def test_a_model_in_parts_goes_on_after_a_forward_that_failed_on_all_ranks(
    rank: int, world_size: int, shape: tuple[int, int]
) -> None:
    mesh = kept_mesh(*shape)
    hashes = []
    for fails in (False, True):
        model, optimizer = small(mesh)
        for step in range(3):
            if fails and step:
                # Where the batch is wrong, as all ranks see; and where none has come to a collective of the parts yet.
                place = model.module.blocks[1] if step == 1 else model.module.embed
                handle = place.register_forward_pre_hook(lambda module, args: 1 / 0)
                with pytest.raises((ZeroDivisionError, RemoteRankError), match="division"):
                    divided.loss_of(model, step, 0)
                handle.remove()
            optimizer.backward(divided.loss_of(model, step, mesh["dp"].get_local_rank()))
            optimizer.step()
        hashes.append(state_hash(model, optimizer))
        model.close()
    assert hashes[0] == hashes[1]


@on_ranks(4, timeout_s=40)
def test_a_save_that_fails_in_one_part_fails_in_all_and_the_next_one_is_made(rank: int, world_size: int) -> None:
    """`rank_timeout` is longer than the test may take: ranks of other parts hear of it."""
    mesh = kept_mesh(2, 2)
    model, optimizer = small(mesh)
    train(model, optimizer, mesh["dp"].get_local_rank(), steps=1)
    folder = gathered(TemporaryDirectory().name)[0]

    def fail(*args: Any) -> None:
        raise MemoryError("no room on rank 3")

    with mock.patch("gemini.checkpoint.saving.Contents", fail if rank == 3 else Contents):
        with pytest.raises((MemoryError, RemoteRankError), match="no room on rank 3"):
            save_checkpoint(folder, model, optimizer)
    save_checkpoint(folder, model, optimizer)
    train(model, optimizer, mesh["dp"].get_local_rank(), steps=1)
    after = state_hash(model, optimizer)
    load_checkpoint(folder, model, optimizer)
    train(model, optimizer, mesh["dp"].get_local_rank(), steps=1)
    assert state_hash(model, optimizer) == after
    model.close()


def one_fails(rank: int, world_size: int, how: str) -> None:
    mesh = kept_mesh(2, 2)
    model, optimizer = small(mesh)
    train(model, optimizer, mesh["dp"].get_local_rank(), steps=1)
    if rank == 3:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        model.module.blocks[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    try:
        train(model, optimizer, mesh["dp"].get_local_rank(), steps=2)
    except Exception as error:
        if how != "raises and goes on":
            raise
        first = error
    try:
        model(divided.batch(9, 0))
    except (RankLostError, RemoteRankError) as error:
        raise first from error


@pytest.mark.parametrize("how", ["raises", *in_soak("killed", "raises and goes on")])
def test_a_rank_that_fails_ends_those_with_other_parts_too(ranks: RankPool, how: str) -> None:
    """They wait in torch's own collectives for it, long before `rank_timeout` is over."""
    exits = ranks(4).run(one_fails, how, fresh=True, timeout_s=45)
    assert [each.exitcode for each in exits] == [1, 1, 1, -signal.SIGKILL if how == "killed" else 1], exits
    for each in exits[:3]:
        words = "lost" if how == "killed" else "^rank 3.*division by zero"
        assert re.search(words, str(each.error)), each


# -- The page, the example, and a model of Hugging Face.


@on_ranks(4)
def test_the_snippet_of_the_page_trains(rank: int, world_size: int) -> None:
    kept_mesh(2, 2)
    (snippet,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "parallelism.md").read_text(), re.S)
    names: dict[str, Any] = {}
    with mock.patch("gemini.launch_from_torch"):  # the ranks have met
        exec(compile(snippet, "snippet", "exec"), names)
    model, optimizer = names["model"], names["optimizer"]
    x = torch.ones(2, 64)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    assert model.module[0].weight.shape == (128, 64)
    model.close()


@pytest.mark.soak
def test_the_example_goes_on_from_another_mesh(tmp_path: Path) -> None:
    def losses(ranks: int, *flags: str) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(ROOT / "examples" / "tensor_parallel.py"), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return re.findall(r"step \d+: loss (\d+\.\d{4})", done.stdout)

    through = losses(4, "--parts", "1", "--steps", "4")
    assert losses(4, "--steps", "2", "--save", "checkpoints") == through[:2]
    assert losses(2, "--steps", "2", "--load", "checkpoints", "--policy", "cpu") == through[2:]
    assert losses(1, "--steps", "2", "--load", "checkpoints", "--parts", "1") == through[2:]


def llama(rank: int, world_size: int, folder: str, how: str) -> list[float]:
    """The largest differences of weights and logits from plain training, of a Llama on a mesh."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=4, **sizes))
    if rank == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    mesh = kept_mesh(*((1, 4) if how == "auto" else (2, 2)))
    if how == "auto":
        net = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    else:
        net = AutoModelForCausalLM.from_pretrained(folder)
        plan, *_ = net._resolve_parallel_plans(DistributedConfig(tp_size=2))
        net = apply_tensor_parallelism(net, mesh["tp"], plan)
    model, optimizer = wrap(mesh["dp"], net, 0.5, make=hybrid, tensor_placement_policy="cpu", chunk_size=None)
    plain_optimizer = hybrid(plain.parameters())
    num_data = mesh["dp"].size()
    for step in range(3):
        own = llama_words(step, mesh["dp"].get_local_rank())
        optimizer.backward(model(input_ids=own, labels=own).loss)
        optimizer.step()
        optimizer.zero_grad()
        for data_rank in range(num_data):
            its = llama_words(step, data_rank)
            (plain(input_ids=its, labels=its).loss / num_data).backward()
        clip_grad_norm_(plain.parameters(), 0.5)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    state = model.state_dict()
    with torch.no_grad():  # by another way of transformers: local tensors
        logits = model(input_ids=llama_words(9, 0)).logits - plain(input_ids=llama_words(9, 0)).logits
    found = [float((state[name] - value).abs().max()) for name, value in plain.state_dict().items()]
    return [max(found), float(logits.abs().max())]


def llama_words(step: int, data_rank: int) -> Any:
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(10 * step + data_rank))


@pytest.mark.soak
@pytest.mark.parametrize("how", ["auto", "2 x 2"])
def test_a_llama_that_transformers_divides_equals_plain(ranks: RankPool, tmp_path: Path, how: str) -> None:
    for exit_ in ranks(4).run(llama, str(tmp_path), how, fresh=True, timeout_s=240):
        assert exit_.exitcode == 0, exit_
        assert max(exit_.result) < 1e-6, exit_.result
