"""The cost model in numbers that a reader can check by hand."""

from dataclasses import replace

import pytest

from gemini import BudgetError, Settings, plan_model
from gemini.placement.cost import (
    KERNELS,
    ModelledStep,
    MovedBytes,
    Ranks,
    all_gather_seconds,
    exchange_seconds,
    modelled_step,
    moves_of,
)
from gemini.placement.demand import Dtype, ModelSpec, OperatorSpec, WeightSpec, Workload
from gemini.placement.machines import MACHINES, Rates
from gemini.placement.predict import expected_schedule, predict

RATES = Rates(
    source="made up for this test",
    flops_per_s={"float32": 100.0, "bfloat16": 200.0},
    device_memory_bytes_per_s=50.0,
    host_memory_bytes_per_s=20.0,
    to_device_bytes_per_s=10.0,
    to_host_bytes_per_s=5.0,
    device_update_bytes_per_s=40.0,
    host_update_bytes_per_s=8.0,
    node_bytes_per_s=16.0,
    network_bytes_per_s=2.0,
    collective_s=0.5,
)


def line(dtype: Dtype) -> ModelSpec:
    """Six operators of one matrix each, which make a chunk each."""
    weights = tuple(WeightSpec(f"layer{i}.w", (32, 32), dtype, True) for i in range(6))
    return ModelSpec(weights, tuple(OperatorSpec(f"layer{i}", (i,), ()) for i in range(6)))


FP32, BF16 = Dtype("float32", 4), Dtype("bfloat16", 2)


def test_each_part_is_its_bytes_by_its_rate() -> None:
    moves = MovedBytes(
        to_device_bytes=100,
        to_host_bytes=50,
        gathered_bytes=64,
        num_gathers=4,
        exchanged_bytes=32,
        num_exchanges=2,
        device_update_bytes=80,
        host_update_bytes=16,
    )
    step = modelled_step(moves, 1000.0, 200.0, "float32", RATES, Ranks(2, 8))
    assert step.parts == {
        "forward and backward": 32.0,
        "host to device": 10.0,
        "device to host": 10.0,
        "update on the device": 2.0,
        "update on the host": 2.0,
        "gathers": 64 / 2 / 16 + 2.0,
        "exchanges": 32 / 2 / 16 + 1.0,
    }
    assert step.seconds == sum(value for value in step.parts.values() if value is not None)
    assert step.least_seconds == 34.0, "the device computes and updates, and all else hides behind that"
    assert step.utilisation == pytest.approx(3000 / step.seconds / 100)
    assert step.utilisation < step.most_utilisation == pytest.approx(3000 / 34 / 100)
    with pytest.raises(ValueError, match="no rate for float64: there are float32, bfloat16"):
        modelled_step(moves, 1.0, 0.0, "float64", RATES, Ranks(2, 8))


def test_a_likely_step_hides_the_hosts_update_behind_the_forward_and_copies_behind_kernels() -> None:
    moves = MovedBytes(
        to_device_bytes=100, to_host_bytes=50, ahead_bytes=60, device_update_bytes=80, host_update_bytes=160
    )

    def step(defers: bool, kept_bytes: int = 0) -> ModelledStep:
        return modelled_step(moves, 1000.0, 1000.0, "float32", RATES, Ranks(1, 1), kept_bytes=kept_bytes, defers=defers)

    # Kernels of 40 s, a fourth of them in the forward; 4 of 10 s of fetches are waited for, half of them in each.
    assert step(defers=True).likely_seconds == max(10 + 2, 3, 20) + max(30 + 2, 3, 10) + 2
    assert step(defers=False).likely_seconds == (10 + 2) + (30 + 2) + 2 + 20
    assert step(defers=True, kept_bytes=100).parts[KERNELS] == 8 * 100 / 50
    assert step(defers=True, kept_bytes=100).likely_seconds == 20 + (14 * 3 + 2) + 2
    assert step(defers=True).least_seconds <= step(defers=True).likely_seconds <= step(defers=True).seconds


def test_rings_use_every_adapter_of_a_node_and_exchanges_one_for_each_rank() -> None:
    inside, across = Ranks(4, 8), Ranks(16, 4)
    assert all_gather_seconds(1600, inside, RATES) == 1600 * 3 / 4 / 16
    assert all_gather_seconds(1600, across, RATES) == 1600 * 15 / 16 / (4 * 2)
    assert exchange_seconds(1600, inside, RATES) == 1600 * 3 / 4 / 16
    assert exchange_seconds(1600, across, RATES) == 1600 * 12 / 16 / 2
    assert all_gather_seconds(1600, Ranks(1, 8), RATES) == exchange_seconds(1600, Ranks(1, 8), RATES) == 0
    slow_node = replace(RATES, node_bytes_per_s=0.1)
    assert all_gather_seconds(1600, across, slow_node) == 1600 * 15 / 16 / 0.1


def test_groups_gather_and_reduce_inside_a_node_and_replicas_go_over_the_network() -> None:
    ranks = Ranks(8, 4)
    group, replicas = ranks.divided(2)
    assert (group, replicas, Ranks(16, 8).divided(4)) == (Ranks(4, 4), Ranks(2, 1), (Ranks(4, 4), Ranks(4, 2)))
    moves = moves_of(plan_model(line(FP32), Settings(chunk_size=1024, shard_group_size=4), 8))
    alone = moves_of(plan_model(line(FP32), Settings(chunk_size=1024), 4))
    assert moves == replace(alone, num_replicas=2, replicated_bytes=6 * 256 * (4 + 4), num_replicated=6 * 3)
    step, one_group = (
        modelled_step(its, 1.0, 0.0, "float32", RATES, of) for its, of in ((moves, ranks), (alone, group))
    )
    assert step.parts["gathers"] == one_group.parts["gathers"]
    found, in_group = step.parts["exchanges"], one_group.parts["exchanges"]
    over = exchange_seconds(moves.replicated_bytes, replicas, RATES)
    assert found is not None and in_group is not None and over is not None
    assert found == pytest.approx(in_group + over + 3 * moves.num_exchanges * RATES.collective_s)


def test_what_takes_a_rate_that_nobody_knows_is_named_and_not_in_the_sum() -> None:
    alone = replace(RATES, node_bytes_per_s=None, network_bytes_per_s=None)
    moves = MovedBytes(gathered_bytes=64, num_gathers=1, exchanged_bytes=32, num_exchanges=1)
    step = modelled_step(moves, 100.0, 0.0, "bfloat16", alone, Ranks(2, 2))
    assert step.unknown == ("gathers", "exchanges")
    assert step.seconds == step.least_seconds == 1.5


def test_ranks_that_do_not_fill_their_nodes_are_refused() -> None:
    assert (Ranks(3, 8).on_a_node, Ranks(3, 8).num_nodes, Ranks(16, 8).num_nodes) == (3, 1, 2)
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of 8"):
        Ranks(12, 8)


def test_nothing_moves_where_everything_rests_on_one_device() -> None:
    numel = 6 * 1024
    assert moves_of(plan_model(line(FP32), Settings(), 1)) == MovedBytes(device_update_bytes=28 * numel)
    assert moves_of(plan_model(line(BF16), Settings(), 1)) == MovedBytes(device_update_bytes=26 * numel)


@pytest.mark.parametrize("slots", [2, 4])
def test_what_rests_on_the_host_comes_for_the_forward_and_what_has_left_for_the_backward(slots: int) -> None:
    settings = Settings(tensor_placement_policy="cpu", chunk_size=1024, model_data_memory=(slots + 2) * 4096)
    try:
        plan = plan_model(line(FP32), settings, 1)
    except BudgetError as refused:
        plan = plan_model(line(FP32), replace(settings, model_data_memory=refused.needed_bytes), 1)
    there = plan.placement.num_slots[0]
    moves = moves_of(plan)
    assert moves.to_device_bytes == (6 + 5 - there) * 4096, "backward finds the last there, and reads not the first"
    assert moves.to_host_bytes == 6 * 4096, "each gradient once; the update is where the moments are"
    assert moves.host_update_bytes == 28 * 6 * 1024


def test_ranks_gather_twice_and_exchange_once() -> None:
    least = plan_model(line(BF16), Settings(chunk_size=1024), 4).minimum_bytes
    plan = plan_model(line(BF16), Settings(chunk_size=1024, model_data_memory=least), 4)
    moves = moves_of(plan)
    assert moves.num_gathers == 11 - plan.placement.num_slots[0]
    assert moves.gathered_bytes == moves.num_gathers * 2048
    assert (moves.exchanged_bytes, moves.num_exchanges) == (6 * 2048, 6)
    whole = moves_of(plan_model(line(BF16), Settings(chunk_size=1024, stage=2), 4))
    assert (whole.num_gathers, whole.num_exchanges) == (6, 6), "new weights are gathered once, after the update"


def test_checkpointing_keeps_inputs_of_blocks_and_computes_blocks_again() -> None:
    work = Workload(
        product_elements=1000,
        block_product_elements=800,
        attention_width=10,
        block_bytes=(300, 500),
        block_input_bytes=20,
        outer_bytes=7,
        logit_bytes=400,
    )
    assert work.activation_bytes(3, is_checkpointed=False) == 3 * (800 + 7 + 400)
    assert work.activation_bytes(3, is_checkpointed=True) == 3 * (2 * 20 + 7 + 500)
    assert work.forward_flops(3, 8) == 2 * 3 * (1000 + 80)
    assert work.computed_again_flops(3, 8) == 2 * 3 * (800 + 80)


def test_rates_are_what_their_json_says_and_nothing_else() -> None:
    assert Rates.from_json(RATES.to_json()) == RATES
    found = RATES.to_json()
    for wrong, words in (
        ([], "rates are an object with the keys source, flops_per_s"),
        ({**found, "speed": 1.0}, "has 'speed', which is no rate"),
        ({key: value for key, value in found.items() if key != "to_host_bytes_per_s"}, "has no 'to_host_bytes_per_s'"),
        ({**found, "to_host_bytes_per_s": "fast"}, "to_host_bytes_per_s must be a finite number above 0, found 'fast'"),
        ({**found, "to_host_bytes_per_s": -1}, "above 0, found -1"),
        ({**found, "to_host_bytes_per_s": True}, "above 0, found True"),
        ({**found, "collective_s": float("nan")}, "collective_s must be a finite number"),
        ({**found, "flops_per_s": {}}, "flops_per_s must have a number for each dtype"),
        ({**found, "flops_per_s": {"float32": 0}}, "flops_per_s of float32"),
        ({**found, "source": ""}, "source must be a text"),
    ):
        with pytest.raises(ValueError, match=words):
            Rates.from_json(wrong)


def test_every_published_machine_says_where_its_figures_stand() -> None:
    for name, machine in MACHINES.items():
        assert machine.name == name and ("datasheet" in machine.source or "whitepaper" in machine.source)
        assert "peaks" in machine.rates.source and machine.rates.collective_s == 0
        assert machine.rates.node_bytes_per_s
        assert (machine.rates.network_bytes_per_s is None) == (machine.ranks_per_node == 1), "one device is no cluster"


def test_a_block_that_is_computed_again_is_gathered_again_for_that() -> None:
    """Two blocks of three operators each: with two slots the first operators of a block have left when it is over."""
    weights = tuple(WeightSpec(f"block{i // 3}.layer{i}.w", (32, 32), BF16, True) for i in range(6))
    spec = ModelSpec(weights, tuple(OperatorSpec(f"block{i // 3}.layer{i}", (i,), ()) for i in range(6)))
    least = plan_model(spec, Settings(chunk_size=1024), 4).minimum_bytes
    plan = plan_model(spec, Settings(chunk_size=1024, model_data_memory=least), 4)
    assert plan.placement.num_slots[0] == 2
    whole, again = moves_of(plan), moves_of(plan, predict(plan, schedule=expected_schedule(plan, ["block0", "block1"])))
    assert whole.num_gathers == 11 - 2
    assert again.num_gathers >= 6 + 2 * 3, "each block takes one more to compute again and one to read its first"
    assert again.num_exchanges == whole.num_exchanges
