"""The benchmarks run: the CPU table at its tiny size, a case of the GPU's on the CPU, and what their parts promise."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks import __main__ as benchmarks
from benchmarks import case_file, gpu_table, modelled_gpu, overlap, streams
from benchmarks.bytes_per_parameter import Line
from benchmarks.deepspeed_adam import DeepSpeedAdam, DeepSpeedFailed
from benchmarks.launch import ROOT, RankFailed, run_ranks
from benchmarks.llama import SIZES, build
from benchmarks.measured_bytes import storage_bytes
from benchmarks.modelled_time import measured_and_modelled
from benchmarks.rounds import Spread, StepTime, paired_ratio, slowest_rank, turn
from benchmarks.step_profile import TIMED
from benchmarks.streams import Mode, Stream, read_stream, update_streams
from gemini.model.workload import most_activations
from gemini.placement.cost import Rates
from optim import cpu_adam

TIMEOUT_S = 200


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.soak
def test_the_train_step_table_runs_and_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "train_step.json"
    done = run("benchmarks.train_step", "--tiny", "--rounds", "1", "--out", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = json.loads(path.read_text())["measurements"]
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert list(one["cases"]) == ["plain", "ours", "ours, half"]
    assert all(difference == 0 for difference in one["loss_differences"].values()), "one rank: the same bits"
    assert all(difference < 1e-4 for difference in two["loss_differences"].values())
    half = one["cases"]["ours, half"]["facts"]
    assert half["device_peak_bytes"] <= half["budget_bytes"] == 8 * one["num_parameters"]
    for setting in ("reshard", "no reshard"):
        theirs = two["cases"][f"FSDP2, {setting}"]["facts"]["peak_model_data"]
        ours = two["cases"][f"ours, {setting} budget"]["facts"]
        assert ours["device_peak_bytes"] <= ours["budget_bytes"] <= theirs["total"]
        assert theirs["total"] >= 16 * two["num_parameters"] // 2 * 0.8, "half of the state, less some gradients"
    assert {(v["case"], v["part"]) for v in one["verdicts"]} >= {("ours", "step_s"), ("ours", "forward_backward_s")}
    assert "met" in done.stdout or "MISSED" in done.stdout


@pytest.mark.soak
def test_a_gpu_case_writes_its_line_also_when_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.jsonl"
    common = ["benchmarks.gpu_case", "--system", "ours", "--tiny", "--device", "cpu", "--out", str(path)]
    curve = ["--steps", "1", "--micro-batches", "1,2"]
    for name, options in (("half", '{"bytes_per_parameter": 8}'), ("all", "{}")):
        done = run(*common, "--name", name, "--options", options, *curve)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run(*common, "--name", "too small", "--options", '{"model_data_memory": 1}')
    assert done.returncode == 1
    entries = case_file.read(path)
    assert entries["half"]["tokens_per_s"] > 0
    assert entries["half"]["error"] is None
    tokens = [point["tokens_per_step"] for point in entries["half"]["curve"]]
    assert tokens == [64, 128], "one micro-batch, then two"
    assert entries["half"]["weights_hash"] == entries["all"]["weights_hash"]
    assert entries["too small"]["error"].startswith("BudgetError")
    gpu_table.main(path)
    table = capsys.readouterr().out
    assert "BudgetError" in table
    assert "half" in table


@pytest.mark.soak
def test_a_checkout_beside_itself_has_the_same_bits() -> None:
    done = run("benchmarks.before_after", str(ROOT), "--tiny", "--rounds", "1", "--ranks", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rank, half" in done.stdout
    refused = run("benchmarks.before_after", str(ROOT / "docs"), "--tiny")
    assert refused.returncode == 2
    message = " ".join(refused.stderr.replace("│", " ").split())  # typer breaks lines at the terminal's width
    assert "has no .venv/bin/python: run make setup there" in message


@pytest.mark.soak
def test_a_launch_of_a_collective_is_priced_in_bytes() -> None:
    done = run("benchmarks.collective_cost", "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a launch is worth" in done.stdout
    assert all(kind in done.stdout for kind in ("all_gather", "reduce_scatter", "as in a step"))


@pytest.mark.soak
def test_tiny_operators_are_timed_beside_plain_pytorch() -> None:
    done = run("benchmarks.tiny_operators", "--tiny", "--rounds", "1", "--ranks", "1")
    assert "ours / plain" in done.stdout, done.stderr


def test_methods_that_the_profile_of_a_step_times_exist() -> None:
    gone = [f"{kind.__name__}.{name}" for kind, names in TIMED.items() for name in names if not hasattr(kind, name)]
    assert gone == []


def test_the_table_of_modelled_steps_in_the_documentation_is_the_one_that_is_printed() -> None:
    rates = Rates.from_json(json.loads(modelled_gpu.RATES.read_text()))
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Modelled beside measured")[2]
    rows = [line.strip("| ").split(" | ") for line in section.partition("\n## ")[0].splitlines() if line[:2] == "| "]
    cases = modelled_gpu.cases_in(modelled_gpu.CASES, rates)
    assert rows[1:] == [
        [cell for number, cell in enumerate(modelled_gpu.row_of(each)) if number != 8] for each in cases
    ]
    near = [each.name for each in cases if 0.8 < each.ratio <= 1.0]
    assert {"ours 7B in 40GiB", "ours 13B auto", "ours on the host 1.3B", "ours on the host 3B"} <= set(near)


@pytest.mark.soak
def test_the_profile_of_a_step_names_calls() -> None:
    done = run("benchmarks.step_profile", "--tiny")
    assert done.returncode == 0, done.stderr
    for word in ("plain, alone", "Collectives.start_all_gather", "Payloads.fetch_ahead", "Reductions.take_gradient"):
        assert word in done.stdout, word


@pytest.mark.soak
def test_the_adam_table_runs_and_judges_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "adam.json"
    done = run("benchmarks.adam", "--tiny", "--rounds", "2", "--threads", "1", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    groups = {group["work"]: group for group in result["groups"]}
    bytes_each = {
        work: {case["traffic_bytes"] / case["num_elements"] for case in group["cases"].values()}
        for work, group in groups.items()
    }
    assert bytes_each == {
        "split, bf16 gradient": {26, 46},
        "split, fp32 gradient": {28},
        "split, bf16 gradient, moments of 8bit": {14},
        "split, bf16 gradient, moments of bf16": {18},
        "whole, bf16 gradient": {26},
        "whole, fp32 gradient": {28},
        "whole + half, bf16 gradient": {28, 40},
        "whole + half, fp32 gradient": {30},
        "norm, bf16": {2},
        "norm, fp32": {4},
    }
    for group in groups.values():
        assert all(len(case["rounds_s"]) == 2 and min(case["rounds_s"]) > 0 for case in group["cases"].values())
        best = group["cases"][group["best_loop"]]
        assert best["role"] == "bandwidth"
        assert best["share_of_bandwidth"]["median"] == 1
    if cpu_adam.is_available():
        judged = {(verdict["base"].split(":")[0], verdict["limit"]) for verdict in result["verdicts"]}
        assert judged >= {("loop", 0.95), ("torch", 3.0), ("read", 0.5)}
    if importlib.util.find_spec("plotly"):
        plot = tmp_path / "adam.html"
        drawn = run("benchmarks.adam_plot", str(path), str(plot))
        assert drawn.returncode == 0, drawn.stderr
        assert "split, bf16 gradient" in plot.read_text()


def test_a_walk_over_streams_leaves_what_it_reads_and_writes_as_it_was() -> None:
    values = torch.randn(64 * 1000)
    halves = values.bfloat16()
    before = values.clone()
    walked = [Stream(values, Mode.READ_WRITE), Stream(halves, Mode.READ)]
    assert sum(stream.traffic_bytes for stream in walked) == values.numel() * (8 + 2)
    for num_threads in (1, 3):
        for options in ({}, {"block": 256}, {"ahead_bytes": 2048, "nontemporal": True}):
            update_streams(walked, num_threads=num_threads, **options)
        read_stream(values, num_threads=num_threads, lanes=4)
    assert torch.equal(values, before)
    written = torch.ones(64 * 1000)
    update_streams([Stream(written, Mode.WRITE)], num_threads=3)
    assert not written.any(), "every element was reached"
    with pytest.raises(ValueError, match="multiple of 64"):
        update_streams([Stream(values[:65], Mode.READ)], num_threads=1)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    streams.library.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(streams.CompilerMissing, match=r"g\+\+"):
        streams.library()


def test_deepspeed_that_is_not_there_fails_with_its_message(tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed"):
        pytest.skip("it is there")
    with pytest.raises(DeepSpeedFailed, match="No module named 'deepspeed'"):
        DeepSpeedAdam(sys.executable, 64, 1, tmp_path / "log")


@pytest.mark.parametrize(  # activations count 0.1 bytes in layers as small as these
    ("only", "least", "most"),
    [
        ("cuda, smallest budget, 1 rank", 13.9, 14.2),
        ("cpu, smallest budget, 8bit, 1 rank", 8.0, 8.3),  # biases have fp32 moments
        ("FSDP2", 15.9, 16.1),
    ],
)
@pytest.mark.soak
def test_bytes_per_parameter_are_measured(tmp_path: Path, only: str, least: float, most: float) -> None:
    path = tmp_path / "bytes.json"
    done = run("benchmarks.bytes_per_parameter", "--tiny", "--only", only, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (system,) = json.loads(path.read_text())["systems"]
    assert least <= system["lines"]["held"]["storages"]["bytes_per_parameter"] <= most
    assert system["sizes"][0]["held"]["resident"] > system["sizes"][0]["held"]["storages"]
    if "planned" in system["sizes"][0]["by_rank"][0]:
        numels = [size["num_parameters"] for size in system["sizes"]]
        planned = Line.through(numels, [sum(rank["planned"] for rank in size["by_rank"]) for size in system["sizes"]])
        found = system["lines"]["held"]["storages"]["bytes_per_parameter"]
        assert planned.bytes_per_parameter == pytest.approx(found, rel=0.01)


@pytest.mark.soak
def test_the_loss_with_small_moments_is_printed_beside_that_of_fp32_ones() -> None:
    done = run("benchmarks.state_loss", "--tiny", "--seeds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in ("fp32", "8bit", "bf16", "seed 1"))


@pytest.mark.soak
def test_resident_memory_grows_by_at_most_14_point_3_bytes_a_parameter() -> None:
    done = run("benchmarks.resident_memory")
    assert done.returncode == 0, done.stdout + done.stderr


def test_storages_are_counted_once_and_what_hides_in_gradients_too() -> None:
    before = storage_bytes()
    weight = torch.nn.Parameter(torch.zeros(2**20))
    views = [weight.detach().view(-1, 16)[1:], weight.detach().view(torch.int32)]
    assert storage_bytes() - before == weight.nbytes
    weight.sum().backward()
    del views
    assert storage_bytes() - before == 2 * weight.nbytes
    del weight
    assert storage_bytes() == before


def test_the_slope_leaves_out_what_does_not_grow() -> None:
    line = Line.through([10, 20, 40, 80], [1000 + 14 * n for n in (10, 20, 40, 80)])
    assert line.bytes_per_parameter == pytest.approx(14)
    assert line.intercept_bytes == pytest.approx(1000)
    assert line.largest_residual_bytes == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="two sizes"):
        Line.through([10, 10], [1, 2])


def test_modelled_times_stand_beside_measured_ones() -> None:
    """On one rank, in this process: a step of a 0.4 M model."""
    found = measured_and_modelled(0, 1, tiny=True, rounds=1)
    for place, its in found["places"].items():
        assert len(its["measured_s"]) == 1 and 0 < its["all_overlap_s"] <= its["no_overlap_s"], place
    host = found["places"]["all on the host"]["moves"]
    assert host["to_device_bytes"] > 0 and host["host_update_bytes"] > 0 == host["device_update_bytes"]
    assert found["places"]["all on the device"]["moves"]["to_device_bytes"] == 0


def test_benchmarks_list_themselves() -> None:
    done = run("benchmarks", "--list")
    assert "train_step" in done.stdout
    assert done.returncode == 0
    with pytest.raises(typer.BadParameter, match="no benchmark is called 'no_such_one'; there are: train_step"):
        benchmarks.main(["no_such_one"])


@pytest.mark.soak
def test_a_rank_that_raises_fails_the_run_with_its_message() -> None:
    assert run_ranks("tests.harness.launched:raising", 1, {"who": 5}, 60) == ["rank 0"]
    with pytest.raises(RankFailed, match="rank 1 of 2 gives up"):
        run_ranks("tests.harness.launched:raising", 2, {"who": 1}, 60)


@pytest.mark.soak
def test_a_rank_that_does_not_end_is_killed() -> None:
    with pytest.raises(RankFailed, match="did not end within 4 s"):
        run_ranks("tests.harness.launched:sleeping", 1, {}, 4)


def test_ratios_are_paired_by_round() -> None:
    slow_machine = [1.0, 10.0, 1.0, 10.0, 1.0]
    assert paired_ratio([0.9 * s for s in slow_machine], slow_machine).median == pytest.approx(0.9)
    with pytest.raises(ValueError, match="argument"):
        paired_ratio([1.0], [1.0, 2.0])


def test_a_spread_is_median_quartiles_and_ends() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0, 1.0, 5.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_every_case_comes_first_equally_often() -> None:
    orders = [turn(["a", "b", "c"], number) for number in range(6)]
    assert [order[0] for order in orders] == ["a", "b", "c"] * 2
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_the_slowest_rank_counts_round_by_round() -> None:
    first = [StepTime(1.0, 1.0, 1.0), StepTime(5.0, 1.0, 2.0)]
    second = [StepTime(2.0, 0.5, 3.0), StepTime(1.0, 1.0, 4.0)]
    assert slowest_rank([first, second]) == [StepTime(2.0, 0.5, 4.0), StepTime(5.0, 1.0, 6.0)]


@pytest.mark.parametrize("line", ["", "no json", '{"name": "a", "x"'])
def test_a_case_file_survives_a_line_that_was_cut_off(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cases.jsonl"
    entries: list[dict[str, Any]] = [{"name": "a", "x": 1}, {"name": "b", "x": 2}]
    for entry in entries:
        case_file.write(path, entry)
    with open(path, "a") as file:
        file.write(line + "\n")
    case_file.write(path, {"name": "a", "x": 3})
    assert case_file.read(path) == {"a": {"name": "a", "x": 3}, "b": {"name": "b", "x": 2}}


def test_the_gpus_model_is_known_to_checkpoint_its_blocks() -> None:
    """The bound of the first batch decides how much model data the first step leaves on the device."""
    model, tokens = build(SIZES["tiny"], torch.float32, torch.device("cpu")), torch.zeros(2, 32, dtype=torch.int64)
    bound = most_activations(model, [tokens])
    for block in model.blocks:
        block.gradient_checkpointing = False
    without = most_activations(model, [tokens])
    assert bound is not None and without is not None
    assert bound < 0.6 * without


def _event(category: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


def test_what_ran_beside_what_is_read_from_a_trace(tmp_path: Path) -> None:
    events = [
        _event("user_annotation", "step", 0, 10_000),
        _event("kernel", "gemm", 1_000, 4_000),
        _event("kernel", "gemm", 3_000, 5_000),  # on another stream
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4_000, 6_000),
        _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5_500, 7_000),
        _event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 8_000, 9_000),  # crosses no link
        {"ph": "i", "name": "an instant", "ts": 20_000},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = overlap.read(path)
    assert found == overlap.Overlap(10.0, 4.0, 2.0, 1.5, 1.0, 2.0, 4.0)
    assert "copies beside kernels 1.0 (33.3%), exposed 2.0; device idle 4.0" in found.in_words()


def test_a_trace_without_a_step_is_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    done = run("benchmarks.overlap", str(path))
    assert done.returncode == 1 and "no event that lasts" in done.stderr


@pytest.mark.soak
def test_bytes_by_stage_are_those_of_the_formula() -> None:
    done = run("benchmarks.stages", "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.endswith(") |") and " ms (" in line]
    assert len(rows) == 4 + 7
    for row in rows:
        assert float(row[4]) == pytest.approx(float(row[5]), rel=0.02)
        assert float(row[6].split()[0]) == pytest.approx(100 * (float(row[4]) / float(row[5]) - 1), abs=0.3)
