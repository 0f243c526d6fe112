"""Weights and gradients that travel in 8 or 4 bits: what arrives, what stays exact, and how many bytes are sent.

REF computes with the weights that ranks get, takes the mean of the gradients that ranks get, and updates exact masters.
"""

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gemini
from gemini import (
    GatheredParameters,
    ShardedModel,
    ShardedOptimizer,
    load_checkpoint,
    save_checkpoint,
    state_hash,
)
from gemini.deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from gemini.placement.simulate import Exchange
from sharding import ALIGNMENT, Collectives, WireFormat, exchange_numels, shown
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.payloads import (
    TAG,
    TAIL,
    collectives,
    collectives_of_a_device,
    layout_of,
    ordered_sum,
    reduce_scatter,
    same_bits,
    shard_of,
    torch_memory,
    values,
)
from tests.zoo import mlp

INT8, INT4 = WireFormat(8), WireFormat(4)
BOTH = {"quantized_weights": 8, "quantized_gradients": 4}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MANY = [200, 0, 3, 1]  # blocks of a rank, by unit: more than fit into the few that are worked on apart


# -- What arrives.


def made(world_size: int) -> list[Collectives]:
    return [collectives(world_size), collectives_of_a_device(world_size)]


@on_ranks(1, 2, 3)
def test_all_ranks_get_the_same_values_near_those_that_are_sent(rank: int, world_size: int) -> None:
    for ours in made(world_size):
        for wire in (INT8, INT4):
            for dtype in FLOATS:
                for factors in ([6], MANY, [1]):
                    layout = layout_of(factors, world_size).traveling(wire)
                    whole = values(1, layout.numel + TAIL, dtype)
                    wanted = whole.clone()
                    if world_size > 1:
                        wanted[: layout.numel] = shown(wire, whole[: layout.numel])
                    own = shard_of(whole, layout, rank)
                    for shard in (own, None):
                        payload = torch.full_like(whole, float("nan"))
                        payload[layout.numel :] = whole[layout.numel :]
                        if shard is None:
                            for piece in layout.slices(rank):
                                payload[piece.in_payload] = own[piece.in_shard]
                        before = ours.bytes_sent
                        ours.all_gather(payload, shard, layout, TAG)
                        assert same_bits(payload, wanted), (wire, dtype, factors, shard is None)
                        assert same_bits(own, shard_of(whole, layout, rank))
                        sent = wire.num_bytes(layout.numel) * (world_size - 1) // world_size
                        assert ours.bytes_sent - before == sent


@on_ranks(1, 2, 3)
def test_a_reduction_adds_what_arrives_in_rank_order(rank: int, world_size: int) -> None:
    """In the scratch that is documented, with the same bits in every layout."""
    asked: list[tuple[int, int]] = []

    def scratch(numel: int, dtype: torch.dtype) -> Tensor:
        asked.append((numel, dtype.itemsize))
        return torch.full((numel * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)

    for ours in made(world_size):
        for wire in (INT8, INT4):
            for dtype in FLOATS:
                for factors in (MANY, [sum(MANY)]):
                    layout = layout_of(factors, world_size).traveling(wire)
                    payloads = [values(r, layout.numel, dtype) for r in range(world_size)]
                    arrived = [shown(wire, payload.float()) for payload in payloads]
                    total = ordered_sum(arrived) / world_size if world_size > 1 else payloads[0]
                    for rest in {dtype, torch.float32}:
                        asked.clear()
                        payload, before = payloads[rank].clone(), ours.bytes_sent
                        out = torch.full((layout.shard_numel,), float("nan"), dtype=rest)
                        reduce_scatter(ours, payload, layout, out, TAG, scratch=scratch)
                        assert same_bits(out, shard_of(total.to(rest), layout, rank)), (wire, dtype, rest, factors)
                        assert same_bits(payload, payloads[rank])
                        sent = wire.num_bytes(layout.numel) * (world_size - 1) // world_size
                        assert ours.bytes_sent - before == sent
                        if world_size > 1:
                            wanted = exchange_numels(layout.shard_numel, layout, rest is not torch.float32)
                            tile = [] if rest is torch.float32 else [(layout.shard_numel, 4)]
                            assert asked == [*wanted, *tile]


@on_ranks(2, 3)
def test_replicas_add_what_arrives_and_all_get_the_same_mean(rank: int, world_size: int) -> None:
    ours = collectives(world_size)
    for wire in (INT8, INT4):
        for blocks in (1, 7, 200):
            sums = [values(r, blocks * ALIGNMENT, torch.float32) for r in range(world_size)]
            mean = shown(wire, ordered_sum([shown(wire, each) for each in sums]) / (2 * world_size))
            for rest in (torch.float32, torch.bfloat16):
                own, out, before = sums[rank].clone(), torch.empty(blocks * ALIGNMENT, dtype=rest), ours.bytes_sent
                work = torch.empty(3 * ALIGNMENT)
                ours.start_encoded_sum(own, out, 2 * world_size, torch_memory, wire, work).finish()
                assert same_bits(out, mean.to(rest)), (wire, blocks, rest)
                sent = 2 * (wire.num_bytes(blocks * ALIGNMENT) * (world_size - 1) // world_size)
                assert ours.bytes_sent - before == sent


@on_ranks(2)
def test_gathers_that_travel_so_are_in_flight_at_once(rank: int, world_size: int) -> None:
    ours, wanted, payloads, flights = collectives(world_size), [], [], []
    for lane in range(3):
        layout = layout_of([40 * (lane + 1)], world_size).traveling(INT8)
        whole = values(lane, layout.numel, torch.bfloat16)
        payload = torch.empty_like(whole)
        flights.append(ours.start_all_gather(payload, shard_of(whole, layout, rank), layout, TAG, use=f"{lane}"))
        payloads.append(payload)
        wanted.append(shown(INT8, whole))
    for flight in reversed(flights):
        flight.finish()
    assert all(map(same_bits, payloads, wanted))


# -- A training equals a plain one with these roundings.


class Odd(nn.Module):
    """Sizes that no number of ranks divides, one of them a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(mlp.WIDTH, 37), nn.Linear(37, mlp.WIDTH)
        self.scale, self.shift = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.linspace(-1, 1, 37))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) * self.scale + self.shift))


def rounded(bits: int | None, x: Tensor) -> Tensor:
    if bits is None:
        return x.clone()
    return shown(WireFormat(bits), x.detach().flatten()).view(x.shape)


def plain(
    world_size: int, steps: int, weights: int | None, gradients: int | None, groups: int = 1
) -> dict[str, Tensor]:
    """The weights after a training on all ranks' data, in fp32."""
    master = mlp.build(Odd)
    optimizer = mlp.adam(master.parameters())
    size = world_size // groups
    for step in range(steps):
        of_ranks = []
        for rank in range(world_size):
            used = mlp.build(Odd)
            with torch.no_grad():
                for parameter, exact in zip(used.parameters(), master.parameters(), strict=True):
                    parameter.copy_(rounded(weights if size > 1 else None, exact))
            loss_of(used, step, rank).backward()
            of_ranks.append([rounded(gradients, parameter.grad) for parameter in used.parameters()])
        for place, parameter in enumerate(master.parameters()):
            rows = [
                ordered_sum([of_ranks[first + r][place] for r in range(size)]) for first in range(0, world_size, size)
            ]
            if groups == 1:
                parameter.grad = rows[0] / world_size
            else:
                mean = ordered_sum([rounded(gradients, row) for row in rows]) / world_size
                parameter.grad = rounded(gradients, mean)
        optimizer.step()
        optimizer.zero_grad()
    return dict(master.state_dict())


def loss_of(model: Any, step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    loss: Tensor = model(mlp.inputs(10 * step + rank, dtype)).float().square().mean()
    return loss


def trained(rank: int, steps: int = 3, make: type[nn.Module] = Odd, **wrap: Any) -> tuple[list[str], dict[str, Tensor]]:
    """The hashes of all states after some steps on the data of `rank`, and the weights."""
    model = ShardedModel(mlp.build(make), **{"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", **wrap})
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    for step in range(steps):
        loss_of(model, step, rank, wrap.get("dtype", torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [state_hash(model), state_hash(optimizer)], dict(model.state_dict())
    model.close()
    return found


@on_ranks(2, 3)
@pytest.mark.parametrize(("weights", "gradients"), [(8, 4), (None, 8), (4, None)], ids=str)
def test_a_training_equals_plain_with_what_arrives(
    rank: int, world_size: int, weights: int | None, gradients: int | None
) -> None:
    wanted = plain(world_size, 3, weights, gradients)
    for policy in ("cuda", "cpu"):
        quantized = {"quantized_weights": weights, "quantized_gradients": gradients}
        _, found = trained(rank, tensor_placement_policy=policy, **quantized)
        mlp.assert_same(found, wanted)


@on_ranks(4, timeout_s=120)
def test_replicas_of_shards_equal_plain_with_what_arrives_at_each_level(rank: int, world_size: int) -> None:
    wanted = plain(world_size, 3, 8, 4, groups=2)
    for stage in (2, 3):
        weights = 8 if stage == 3 else None
        found = trained(rank, shard_group_size=2, stage=stage, quantized_weights=8, quantized_gradients=4)
        mlp.assert_same(found[1], wanted if weights else plain(world_size, 3, None, 4, groups=2))
        assert len(set(map(str, gathered(found[0])))) == 1


@on_ranks(2, timeout_s=180)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_are_the_same_over_budgets_places_and_chunks(rank: int, world_size: int, dtype: torch.dtype) -> None:
    options = {**BOTH, "dtype": dtype, "make": Odd}
    with TemporaryDirectory() as folder:
        places: dict[str, dict[str, Any]] = {
            "fits": {"tensor_placement_policy": "cuda"},
            "host": {"tensor_placement_policy": "cpu"},
            "prefetched": {"tensor_placement_policy": "cpu", "max_prefetch": 3},
            "waits for each": {"tensor_placement_policy": "cpu", "max_prefetch": 0},
            "deferred": {"tensor_placement_policy": "cpu", "deferred_update": True},
            "in the backward": {"tensor_placement_policy": "cpu", "update_in_backward": True},
            "disk": {"tensor_placement_policy": "disk", "disk_path": folder},
            "many units": {"shard_strategy": "tensor", "chunk_size": 8 * mlp.CHUNK_NUMEL},
            "one chunk": {"chunk_size": 1 << 16},
        }
        runs = {name: trained(rank, **options, **place) for name, place in places.items()}
    for name, run in runs.items():
        assert run[0] == runs["fits"][0], name
    exact = trained(rank, dtype=dtype)
    assert exact[0] != runs["fits"][0]
    for name, weight in exact[1].items():
        torch.testing.assert_close(runs["fits"][1][name], weight, rtol=0, atol=0.1)


@on_ranks(2)
def test_stages_that_gather_no_weights_have_the_bits_of_their_gradients(rank: int, world_size: int) -> None:
    of_stage = {stage: trained(rank, stage=stage, **BOTH)[1] for stage in (1, 2)}
    wanted = plain(world_size, 3, None, 4)
    mlp.assert_same(of_stage[1], wanted)
    mlp.assert_same(of_stage[2], wanted)
    mean_travels_too = trained(rank, stage=0, **BOTH)
    assert len(set(map(str, gathered(mean_travels_too[0])))) == 1


@on_ranks(2)
def test_micro_batches_without_sync_travel_once(rank: int, world_size: int) -> None:
    """Their sum travels, in tiles. Where all is exact, ones of the same sign, it arrives so."""
    for options in ({}, {"dtype": torch.bfloat16}):
        model = mlp.wrap("cpu", quantized_gradients=8, **options)
        optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = {name: weight.float() for name, weight in model.state_dict().items()}
        for micro in range(3):
            loss = sum(parameter.sum() for parameter in model.parameters()) + 0 * mlp.loss_of(
                model, micro, options.get("dtype")
            )
            if micro < 2:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight.float(), before[name] - 3, rtol=2**-7, atol=2**-6)
        model.close()


# -- What stays exact.


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_dicts_and_masters_are_exact_though_the_forward_is_not(
    rank: int, world_size: int, dtype: torch.dtype
) -> None:
    given = mlp.build(Odd).to(dtype).state_dict()
    for policy in ("cuda", "cpu"):
        model = ShardedModel(
            mlp.build(Odd), dtype=dtype, device="emulated", tensor_placement_policy=policy, quantized_weights=4
        )
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        loss = loss_of(model, 0, rank, dtype)
        exact, near = mlp.build(Odd).to(dtype), mlp.build(Odd).to(dtype)
        for parameter in near.parameters():
            parameter.data = rounded(4, parameter)
        assert torch.equal(loss, loss_of(near, 0, rank, dtype)) and not torch.equal(
            loss, loss_of(exact, 0, rank, dtype)
        )
        mlp.assert_same(dict(model.state_dict()), given)
        mlp.assert_same(dict(model.module.state_dict()), given)
        for name, parameter in model.named_parameters():
            master = safe_get_full_fp32_param(parameter)
            assert master is not None and torch.equal(master, given[name].float()), name
        optimizer.zero_grad()
        with TemporaryDirectory() as folder:
            folder = gathered(folder)[0]
            save_checkpoint(folder, model, optimizer)
            other = ShardedModel(mlp.build(Odd), dtype=dtype, device="emulated")
            load_checkpoint(folder, other)
            mlp.assert_same(dict(other.state_dict()), given)
            other.close()
            dist.barrier()
        model.close()


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_edit_changes_the_elements_that_it_writes_and_no_others(
    rank: int, world_size: int, dtype: torch.dtype
) -> None:
    for policy in ("cuda", "cpu"):
        model = ShardedModel(
            mlp.build(Odd),
            dtype=dtype,
            device="emulated",
            tensor_placement_policy=policy,
            chunk_size=mlp.CHUNK_NUMEL,
            quantized_weights=8,
        )
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        loss_of(model, 0, rank, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        masters = {name: safe_get_full_fp32_param(each) for name, each in model.named_parameters()}
        weights = dict(model.named_parameters())
        loss_of(model, 1, rank, dtype)  # payloads are there
        with GatheredParameters(weights["first.weight"], modifier_rank=1):
            weights["first.weight"].data[3, 2:5] = 0.25
        with torch.no_grad():
            weights["last.weight"][0, 0] = 0.5
            weights["scale"].fill_(2.0)
        safe_set_full_fp32_param(weights["shift"], torch.full((37,), 0.3))
        wanted["first.weight"][3, 2:5] = 0.25
        wanted["last.weight"][0, 0] = 0.5
        wanted["scale"].fill_(2.0)
        wanted["shift"].fill_(0.3)
        mlp.assert_same(dict(model.state_dict()), wanted)
        near = mlp.build(Odd).to(dtype)
        with torch.no_grad():
            for name, parameter in near.named_parameters():
                parameter.copy_(rounded(8, wanted[name]))
        found = loss_of(model, 2, rank, dtype)
        torch.testing.assert_close(found, loss_of(near, 2, rank, dtype), rtol=1e-2, atol=1e-3)
        mlp.assert_same(dict(model.state_dict()), wanted)
        master = safe_get_full_fp32_param(weights["first.weight"])
        before = masters["first.weight"]
        assert master is not None and before is not None
        before[3, 2:5] = 0.25
        assert torch.equal(master, before)
        optimizer.zero_grad()
        model.close()


@on_ranks(2)
def test_values_that_are_set_show_as_if_they_had_travelled(rank: int, world_size: int) -> None:
    """Whether the payload was there, in which they are set, or is gathered later."""
    wanted = {name: torch.linspace(-1, 0.7, each.numel()).view(each.shape) for name, each in Odd().named_parameters()}
    near = mlp.build(Odd)
    with torch.no_grad():
        for name, parameter in near.named_parameters():
            parameter.copy_(rounded(8, wanted[name]))
    for is_there in (True, False):
        model = ShardedModel(mlp.build(Odd), device="emulated", quantized_weights=8)
        if is_there:
            loss_of(model, 0, rank)
        for name, parameter in model.named_parameters():
            safe_set_full_fp32_param(parameter, wanted[name])
        assert torch.equal(loss_of(model, 1, rank), loss_of(near, 1, rank))
        mlp.assert_same(dict(model.state_dict()), wanted)
        assert "Weights travel in 8 bits an element" in model.plan.explain()
        model.close()


@on_ranks(2)
@pytest.mark.parametrize("secondary", [None, 2])
def test_what_is_written_in_place_trains_as_it_would_arrive(rank: int, world_size: int, secondary: int | None) -> None:
    """A forward computes with the same weights whether the payload that was written to has stayed or not."""
    with torch.no_grad():
        exact = mlp.build(Odd)
        exact.first.weight.view(-1)[:1] = 3.0  # with which all of its block is rounded otherwise
        exact.last.weight.mul_(0.3)
        near = mlp.build(Odd)
        for name, parameter in near.named_parameters():
            parameter.copy_(rounded(8, exact.get_parameter(name)))
    for policy in ("cuda", "static", "cpu"):
        options = {"tensor_placement_policy": policy, "secondary_group_size": secondary}
        model = ShardedModel(mlp.build(Odd), device="emulated", quantized_weights=8, **options)
        loss_of(model, 0, rank)
        weights = dict(model.named_parameters())
        with torch.no_grad():
            weights["first.weight"].view(-1)[:1] = 3.0
            weights["last.weight"].mul_(0.0).add_(exact.last.weight)
        mlp.assert_same(dict(model.state_dict()), dict(exact.state_dict()))  # which brings the edits home
        assert torch.equal(loss_of(model, 1, rank), loss_of(near, 1, rank))
        mlp.assert_same(dict(model.state_dict()), dict(exact.state_dict()))
        model.close()


@on_ranks(2)
def test_an_overflow_is_found_in_what_travels(rank: int, world_size: int) -> None:
    model = mlp.wrap("cpu", dtype=torch.float16, quantized_gradients=4, quantized_weights=8)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), initial_scale=2.0**10, hysteresis=1)
    before = state_hash(model)
    loss = mlp.loss_of(model, rank, torch.float16).float()
    optimizer.backward(loss * (float("inf") if rank else 1.0))
    optimizer.step()
    assert gathered([optimizer.loss_scale, state_hash(model)]) == [[2.0**9, before]] * 2


@on_ranks(1)
def test_one_rank_exchanges_nothing_and_rounds_nothing(rank: int, world_size: int) -> None:
    assert trained(rank, **BOTH)[0] == trained(rank)[0]


# -- How many bytes travel, and what the plan says of it.


@on_ranks(2, 4)
def test_a_step_sends_what_its_plan_says(rank: int, world_size: int) -> None:
    mesh = {} if world_size == 2 else {"shard_group_size": 2}
    for wrap in ({}, {"dtype": torch.bfloat16}, {"stage": 0}, {"stage": 1, "tensor_placement_policy": "cpu"}):
        exact: dict[Exchange, int] = {}
        for quantized in ({}, {"quantized_weights": 8, "quantized_gradients": 4}):
            model = mlp.wrap("smallest", **mesh, **wrap, **quantized)  # type: ignore[arg-type]
            optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
            manager = model.chunk_manager
            for step in range(3):
                before = manager.communicator.bytes_by_group
                model(mlp.inputs(step, model.settings.dtype)).square().mean().backward()
                optimizer.step()
                sent = {group: count - before[group] for group, count in manager.communicator.bytes_by_group.items()}
                optimizer.zero_grad()
            predicted = model.plan.predicted
            exchanged = {what: num_bytes for what, (_, num_bytes) in predicted.exchanged.items()}
            over_replicas = exchanged.get(Exchange.REPLICAS, 0)
            if mesh:
                assert sent["replicas"] == over_replicas // 2, (wrap, quantized)
                assert sent["shards"] == (sum(exchanged.values()) - over_replicas) // 2, (wrap, quantized)
            held = manager.memory.device.ledger
            assert held.peak_bytes == predicted.device_peak, (wrap, quantized)
            if not quantized:
                exact = exchanged
            else:
                itemsize = 2 if "dtype" in wrap else 4
                for what, most in ((Exchange.GATHER, 0.27), (Exchange.REDUCE, 0.14), (Exchange.REPLICAS, 0.14)):
                    if what in exact:
                        fp32 = exact[what] * (4 / itemsize if what is not Exchange.REPLICAS else 8 / (4 + itemsize))
                        assert exchanged[what] <= most * fp32, (what, wrap)
            model.close()


@on_ranks(2)
def test_gradients_of_weights_that_are_larger_than_a_chunk_travel_in_tiles(rank: int, world_size: int) -> None:
    from gemini.placement import needs

    wanted = trained(rank, quantized_gradients=4, chunk_size=256)
    before, needs.TILED_BYTES = needs.TILED_BYTES, 4096
    try:
        model = ShardedModel(
            mlp.build(Odd), device="emulated", chunk_size=256, quantized_gradients=4, model_data_memory=None
        )
        least = model.plan.minimum_bytes
        model.close()
        found = trained(rank, quantized_gradients=4, chunk_size=256, model_data_memory=least)
    finally:
        needs.TILED_BYTES = before
    assert found[0] == wanted[0]


@on_ranks(2)
def test_frozen_weights_alone_travel_so(rank: int, world_size: int) -> None:
    module = mlp.build(Odd)
    module.first.requires_grad_(False)
    model = ShardedModel(module, device="emulated", quantized_frozen_weights=4)
    near = mlp.build(Odd)
    with torch.no_grad():
        for parameter in near.first.parameters():
            parameter.copy_(rounded(4, parameter))
    assert torch.equal(loss_of(model, 0, rank), loss_of(near, 0, rank))
    model.close()


# -- DeepSpeed's names, and what it gets wrong.


@on_ranks(2)
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_deepspeeds_keys_train_with_offload(rank: int, world_size: int, precision: dict[str, Any]) -> None:
    """Its loss is 0 with offload, and it reads bf16 as fp16: weights are as large here as only bf16 has them."""
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **precision,
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
            "zero_quantized_nontrainable_weights": True,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }
    module = mlp.build()
    with torch.no_grad():
        module.layers[0].weight.mul_(1e20)
        module.layers[1].weight.mul_(1e-20)
    engine, *_ = gemini.initialize(module, config=config, verbose=False)
    settings = engine.model.settings
    assert (settings.quantized_weights, settings.quantized_gradients, settings.quantized_frozen_weights) == (8, 4, 8)
    losses = []
    dtype = torch.bfloat16 if precision else None
    for step in range(20):
        loss = mlp.loss_of(engine, step % 2, dtype)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    assert 0 < losses[-1] < losses[0] and torch.isfinite(torch.tensor(losses)).all(), losses
    assert engine.optimizer.grad_norm > 0
    engine.model.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"quantized_weights": 2}, ValueError, "quantized_weights must be 8 or 4, the bits of an element"),
        ({"quantized_gradients": "int4"}, TypeError, "quantized_gradients must be 8 or 4"),
        ({"quantized_frozen_weights": True}, TypeError, "quantized_frozen_weights must be 8 or 4"),
        ({"quantized_weights": 8, "reuse_fp16_shard": True}, ValueError, "leave one of the two out"),
    ],
    ids=str,
)
def test_other_bits_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ShardedModel(mlp.build(), device="emulated", **options)


@pytest.mark.soak
@on_ranks(2, timeout_s=300)
def test_a_long_training_ends_within_a_percent_of_the_exact_loss(rank: int, world_size: int) -> None:
    """A student of a fixed teacher, whose loss falls far; the mean of the last steps is compared."""
    ends = []
    for options in ({}, BOTH, {"quantized_weights": 8, "quantized_gradients": 8}):
        model = mlp.wrap("cpu", dtype=torch.bfloat16, **options)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        losses = []
        for step in range(500):
            loss = mlp.loss_of(model, 2 * step + rank, torch.bfloat16)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        ends.append(sum(losses[-50:]) / 50)
        model.close()
    assert max(ends) <= 1.01 * ends[0] and ends[0] < losses[0], ends
