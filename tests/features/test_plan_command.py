"""`gemini plan`: what it prints is the library's plan, and what it advises works."""

import json
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from typer.testing import CliRunner

from gemini import FreeBytes, Settings, ShardedModel, ShardedOptimizer, plan_model, specs_of
from gemini.cli.app import app
from gemini.model.workload import workload_of
from gemini.placement.demand import Kind, Tier, parse_bytes
from gemini.placement.machines import MACHINES
from optim import HybridAdam
from tests.zoo.mlp import Mlp

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "models"
SMALL = "tests.zoo.mlp:Mlp"
TWO_RANKS = ("--ranks", "2", "--device-memory", "20KiB")
SIZE = re.compile(r"--device-memory ([\d.]+[KMG]?B)")
RATES = {
    "source": "made up",
    "flops_per_s": {"float32": 1e9, "bfloat16": 2e9},
    "device_memory_bytes_per_s": 1e9,
    "host_memory_bytes_per_s": 1e9,
    "to_device_bytes_per_s": 1e6,
    "to_host_bytes_per_s": 2e6,
    "device_update_bytes_per_s": 4e6,
    "host_update_bytes_per_s": 5e6,
    "node_bytes_per_s": 8e6,
    "network_bytes_per_s": None,
    "collective_s": 0.001,
}


def run(*arguments: str, columns: int = 200) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": str(columns)})
    # Lines of progress on stderr stand between the others where the machine is busy.
    return done.exit_code, done.stdout + done.stderr


def asked(*arguments: str) -> dict[str, Any]:
    """What fits, as JSON."""
    code, shown = run(*arguments, "--json")
    assert code == 0, shown
    found: dict[str, Any] = json.JSONDecoder().raw_decode(shown)[0]
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small Llama of bf16-like proportions: 2 MB of fp32 weights."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 448, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    transformers.LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


def test_the_plan_is_the_librarys() -> None:
    found = asked(SMALL, *TWO_RANKS, "--batch", "4", "--stage", "2")
    settings = Settings(stage=2, device_memory="20KiB", device="cuda")
    activations = found["activations_at_most"]["whole"]
    spec = specs_of(Mlp(), settings, 2)
    plan = plan_model(spec, settings, 2, FreeBytes(activations=activations))
    assert sum(found["device"].values()) == plan.device_bytes and sum(found["host"].values()) == plan.host_bytes
    assert found["model_data_budget"] == plan.budget_bytes
    assert found["model_data_minimum_with_these_chunks"] == plan.packed_minimum_bytes
    assert found["device_peak"] == plan.predicted.device_peak + activations <= 20 * 1024
    assert found["moves"]["to_device_bytes"] == plan.predicted.bytes_by_link.get("host->device", 0)
    assert found["parameters"] == 1632 and found["fits"]
    assert (found["cluster"]["ranks"], found["cluster"]["device_memory"]) == (2, 20 * 1024)
    assert "modelled" not in found, "nobody said how fast that machine is"
    assert any("--rates" in note for note in found["notes"])


@pytest.mark.parametrize("states", [0, 1, 3])
def test_the_plan_is_that_of_an_optimizer_with_so_many_states(states: int) -> None:
    options = (SMALL, "--ranks", "1", "--device-memory", "26KiB")
    found, of_adam = asked(*options, "--optim-states", str(states)), asked(*options)
    module = Mlp()
    # The machine that is asked for has accelerators, for which a plan counts other costs.
    with mock.patch.object(Settings, "has_streams", True):
        model = ShardedModel(module, device="emulated", **found["wrap_with"])
    optimizers: dict[int, Any] = {
        0: torch.optim.SGD(model.parameters(), lr=0.1),
        1: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        3: torch.optim.AdamW(model.parameters(), amsgrad=True),
    }
    with mock.patch.object(Settings, "has_streams", True):
        ShardedOptimizer(model, optimizers[states])
    for tier in Tier:
        assert found[tier.value] == model.plan.placement.bytes_by_kind(model.plan.demand, tier)
    total = {
        name: sum(its["device"].values()) + sum(its["host"].values())
        for name, its in (("found", found), ("Adam", of_adam))
    }
    assert (total["found"] > total["Adam"]) == (states > 2)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_the_plan_is_that_of_an_optimizer_of_whole_tensors(name: str) -> None:
    """Muon's momentum lies where Adam's moments of the biases do, and Adafactor keeps a state of these alone."""
    found = asked(SMALL, "--ranks", "1", "--device-memory", "26KiB", "--optimizer", name)
    module = Mlp()
    with mock.patch.object(Settings, "has_streams", True):
        model = ShardedModel(module, device="emulated", **found["wrap_with"])
        matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
        its: Any = [torch.optim.Muon(matrices), HybridAdam(rest)]
        ShardedOptimizer(model, its if name == "muon" else torch.optim.Adafactor(model.parameters()))
    for tier in Tier:
        assert found[tier.value] == model.plan.placement.bytes_by_kind(model.plan.demand, tier)


class Wide(torch.nn.Sequential):
    """Matrices of 65,536 elements, without biases, so that Muon beside Adam keeps one state of them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(*(torch.nn.Linear(256, 256, bias=False) for _ in range(layers)))


class Wider(Wide):
    """Three times as many."""

    def __init__(self) -> None:
        super().__init__(12)


_OF_PARAMETERS = ("param", "grad", "master", "optim")


@pytest.mark.parametrize(("name", "wanted"), [("8bit", 8.03), ("muon", 10.0)])
def test_bytes_of_a_parameter_by_slope_are_those_that_the_command_says(name: str, wanted: float) -> None:
    """Of two sizes: those of the plan before there is a model, and those that a training has taken."""
    planned, held = [], []
    for size in (Wide, Wider):
        options = ("--ranks", "1", "--device-memory", "8MiB", "--host-memory", "64MiB", "--dtype", "bf16")
        found = asked(f"{__name__}:{size.__name__}", *options, "--optimizer", name)
        planned.append(sum(found[tier.value].get(kind, 0) for tier in Tier for kind in _OF_PARAMETERS))
        model = ShardedModel(size(), device="emulated", **{**found["wrap_with"], "dtype": torch.bfloat16})
        parameters = model.parameters()
        optimizer = ShardedOptimizer(
            model, torch.optim.Muon(parameters) if name == "muon" else HybridAdam(parameters, state_dtype=name)
        )
        model(torch.ones(4, 256, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        ledgers = model.chunk_manager.memory.device.ledger, model.chunk_manager.memory.host.ledger
        held.append(sum(each.bytes_by_kind[kind] for each in ledgers for kind in Kind if kind in _OF_PARAMETERS))
        model.close()
    numel = 8 * 65536
    assert (held[1] - held[0]) / numel == pytest.approx((planned[1] - planned[0]) / numel, rel=0.01)
    assert (held[1] - held[0]) / numel == pytest.approx(wanted, rel=0.01)


@pytest.mark.soak
def test_thirty_billion_parameters_with_8_bit_moments_fit_a_device_of_139_gib_and_112_gib_of_host(
    tmp_path: Path,
) -> None:
    sizes = {"num_hidden_layers": 64, "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48}
    config = transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], max_position_embeddings=4096)
    config.save_pretrained(tmp_path)
    machine = ("--ranks", "1", "--device-memory", "139GiB", "--host-memory", "112GiB", "--rates", "none")
    options = (str(tmp_path), *machine, "--dtype", "bf16", "--activation-checkpointing", "--sequence-length", "4096")
    found = asked(*options, "--optimizer", "8bit")
    assert found["fits"] and found["parameters"] == 29_385_037_824
    moments = found["device"]["optim"] + found["host"]["optim"]
    assert moments / found["parameters"] == pytest.approx(2 + 1 / 32, rel=0.03), "embeddings have fp32 ones"


def test_an_optimizer_of_another_name_is_refused_with_the_names() -> None:
    code, shown = run(SMALL, "--optimizer", "shampoo")
    assert code == 2 and "valid: adam, muon, adafactor, sgd, momentum, amsgrad" in shown


def test_seconds_are_bytes_and_flops_by_the_rates_that_are_given(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(RATES))
    found = asked(SMALL, *TWO_RANKS, "--batch", "4", "--rates", str(file))
    moves, modelled = found["moves"], found["modelled"]
    parts = modelled["seconds_by_part"]
    products = sum(p.numel() for p in Mlp().parameters() if p.dim() > 1)
    assert modelled["model_flops"] == 6 * products * 4, "four rows of one token each"
    kept = workload_of(Mlp(), 4).activation_bytes(4, is_checkpointed=False)
    assert parts == {
        "forward and backward": pytest.approx(6 * products * 4 / 1e9),
        "kernels beside them": pytest.approx(6 * kept / 1e9),
        "host to device": pytest.approx(moves["to_device_bytes"] / 1e6),
        "device to host": pytest.approx(moves["to_host_bytes"] / 2e6),
        "update on the device": pytest.approx(moves["device_update_bytes"] / 4e6),
        "update on the host": pytest.approx(moves["host_update_bytes"] / 5e6),
        "gathers": pytest.approx(moves["gathered_bytes"] / 2 / 8e6 + moves["num_gathers"] * 0.001),
        "exchanges": pytest.approx(moves["exchanged_bytes"] / 2 / 8e6 + moves["num_exchanges"] * 0.001),
    }
    assert modelled["seconds_without_overlap"] == pytest.approx(sum(parts.values()))
    assert modelled["seconds_with_all_overlap"] == pytest.approx(parts["gathers"] + parts["exchanges"])
    assert moves["num_exchanges"] == found["chunks"] > 0
    code, shown = run(SMALL, *TWO_RANKS, "--rates", str(file))
    assert code == 0 and "a step, modelled" in shown and "Modelled step:" in shown and "Rates: made up." in shown


def test_ranks_of_several_nodes_are_divided_as_the_model_of_a_step_says(tmp_path: Path, config: Path) -> None:
    file, options = (
        tmp_path / "rates.json",
        (SMALL, "--ranks", "8", "--ranks-per-node", "2", "--device-memory", "80KiB"),
    )
    file.write_text(json.dumps({**RATES, "network_bytes_per_s": 1e4}))
    slow = asked(*options, "--rates", str(file))
    assert slow["wrap_with"]["shard_group_size"] == 2
    (why,) = [note for note in slow["notes"] if note.startswith("Groups chosen")]
    assert "4 replicas of 2 shards, one on each node (--shard-group-size 2): " in why and "s among ranks" in why
    assert "all ranks as one group: " in why and "--secondary-group-size 2" in why
    assert "the same, with states over all ranks (--shard-group-size 2 --optimizer-shard all): " in why
    (note,) = [note for note in slow["notes"] if note.startswith("ShardedModel makes")]
    assert "shard_group_size=2" in note
    # Without room for replicas there is a second copy, and without room for that one group.
    tight = (str(config), *options[1:5], "--sequence-length", "8", "--host-memory", "1MiB", "--rates", str(file))
    second_copy: dict[str, int] = {"secondary_group_size": 2}
    for device, found in (("5MiB", second_copy), ("3MiB", {})):
        fits = asked(*tight, "--device-memory", device)
        (why,) = [note for note in fits["notes"] if note.startswith("Groups chosen")]
        assert "(--shard-group-size 2): does not fit" in why
        assert ("(--secondary-group-size 2): does not fit" in why) == (not found)
        assert {name: size for name, size in fits["wrap_with"].items() if name.endswith("group_size")} == found
        moves, parts = fits["moves"], fits["modelled"]["seconds_by_part"]
        of_all, nearby = moves["gathered_bytes"] * 7 / 8 / (2 * 1e4), moves["nearby_bytes"] / 2 / 8e6
        launches = 0.001 * (moves["num_gathers"] + moves["num_nearby"])
        assert (moves["num_nearby"] > 0) == bool(found)
        assert parts["gathers"] == pytest.approx(of_all + nearby + launches)
    # Without a rate between nodes the way that sends most between them would look fastest.
    file.write_text(json.dumps({**RATES, "network_bytes_per_s": None}))
    unknown = asked(*options, "--rates", str(file))
    assert "shard_group_size" not in unknown["wrap_with"]
    assert any(note.startswith("Groups were not compared: no rate between nodes is known") for note in unknown["notes"])
    # Whoever names groups gets them, also those that are all ranks.
    for given, size in (("8", None), ("4", 4)):
        named = asked(*options, "--rates", str(file), "--shard-group-size", given)
        assert named["wrap_with"].get("shard_group_size") == size
        assert not any(note.startswith("Groups chosen") for note in named["notes"])


def test_this_machine_is_read_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = asked(SMALL)
    assert found["cluster"]["name"] == "this machine" and found["cluster"]["host_memory"] > 10**8
    assert found["cluster"]["rates"]["source"].startswith("measured on")
    assert found["modelled"]["seconds_without_overlap"] > 0
    assert list(tmp_path.glob("gemini/rates-*.json"))


def test_activation_checkpointing_leaves_more_to_chunks(config: Path) -> None:
    options = (str(config), "--ranks", "2", "--device-memory", "60MB", "--batch", "8", "--rates", "dgx-h100")
    whole, checkpointed = asked(*options), asked(*options, "--activation-checkpointing")
    assert checkpointed["activations_at_most"] == whole["activations_at_most"]
    assert checkpointed["model_data_budget"] > whole["model_data_budget"]
    longer = checkpointed["modelled"]["seconds_by_part"]["forward and backward"]
    shorter = whole["modelled"]["seconds_by_part"]["forward and backward"]
    assert 1.2 < longer / shorter < 4 / 3, "blocks have a second forward, and the head has none"
    assert whole["batch"] == {
        "sequences": 8,
        "sequence_length": 64,
        "gradient_accumulation_steps": 1,
        "activation_checkpointing": False,
    }


def test_fractions_of_the_static_policy_are_asked_about(config: Path) -> None:
    options = (str(config), "--ranks", "2", "--device-memory", "1GB", "--rates", "none", "--policy", "static")
    whole = asked(*options)
    some = asked(*options, "--offload-optim-frac", "0.5", "--offload-param-frac", "0.25", "--shard-param-frac", "0.5")
    assert whole["host"].get("optim", 0) == 0 and whole["host"].get("param", 0) == 0
    moments = whole["device"]["optim"]
    assert some["host"]["optim"] == pytest.approx(0.5 * moments, rel=0.3), "whole chunks move"
    assert some["device"]["optim"] + some["host"]["optim"] == moments
    chosen = {"shard_param_frac": 0.5, "offload_optim_frac": 0.5, "offload_param_frac": 0.25}
    assert {name: some["wrap_with"][name] for name in chosen} == chosen
    assert not set(chosen) & set(whole["wrap_with"])
    assert any("offload_optim_frac=0.5" in note for note in some["notes"])


def test_micro_batches_of_a_step_are_asked_about(config: Path) -> None:
    """Four times the products and the gathers, one update, and room for sums of gradients in fp32."""
    options = (str(config), "--ranks", "2", "--device-memory", "1GB", "--dtype", "bf16", "--rates", "dgx-h100")
    one, four = asked(*options), asked(*options, "--gradient-accumulation-steps", "4")
    assert four["batch"]["gradient_accumulation_steps"] == 4
    assert (
        four["wrap_with"]["gradient_accumulation_steps"] == 4 and "gradient_accumulation_steps" not in one["wrap_with"]
    )
    assert four["modelled"]["model_flops"] == 4 * one["modelled"]["model_flops"]
    assert four["activations_at_most"] == one["activations_at_most"]
    assert four["moves"]["device_update_bytes"] == one["moves"]["device_update_bytes"] > 0
    assert four["moves"]["num_exchanges"] == 4 * one["moves"]["num_exchanges"]
    assert four["device"]["grad"] == 3 * one["device"]["grad"], "a sum of 4 bytes beside what arrives, of 2"
    code, shown = run(*options, "--gradient-accumulation-steps", "4")
    assert code == 0 and "in each of 4 micro-batches" in shown


def refused(*arguments: str) -> tuple[dict[str, Any], str]:
    code, shown = run(*arguments, "--json")
    assert code == 1, shown
    found, end = json.JSONDecoder().raw_decode(shown)
    return found, shown[end:]


def test_what_is_advised_where_the_device_is_too_small_is_enough(config: Path) -> None:
    options = (str(config), "--ranks", "2", "--batch", "8")
    found, said = refused(*options, "--device-memory", "7MB")
    assert not found["fits"] and found["refused"]["tier"] == "device"
    assert found["refused"]["needed_bytes"] > found["refused"]["budget_bytes"]
    knobs = " ".join(found["would_change"])
    assert all(command in said for command in found["commands"]), "for people too"
    enough = SIZE.search(knobs)[1]  # type: ignore[index]
    assert asked(*options, "--device-memory", enough)["fits"]
    refused(*options, "--device-memory", f"{parse_bytes(enough, '') * 199 // 200}B")
    sequences = int(re.search(r"--activation-checkpointing --batch (\d+): ", knobs)[1])  # type: ignore[index]
    small = (str(config), "--ranks", "2", "--device-memory", "7MB", "--activation-checkpointing", "--batch")
    assert asked(*small, str(sequences))["fits"]
    refused(*small, str(sequences + 1))


@pytest.mark.soak
def test_what_is_advised_where_the_host_is_too_small_is_enough(config: Path) -> None:
    options = (str(config), "--ranks", "2", "--device-memory", "8MB", "--activation-checkpointing")
    found, _ = refused(*options, "--host-memory", "2MB")
    assert found["refused"]["tier"] == "host"
    knobs = " ".join(found["would_change"])
    enough = re.search(r"--host-memory ([\d.]+[KMG]?B)", knobs)[1]  # type: ignore[index]
    assert asked(*options, "--host-memory", enough)["fits"]
    ranks = re.search(r"--ranks (\d+): with as much memory", knobs)
    assert ranks is not None, knobs
    assert asked(*options, "--host-memory", "2MB", "--ranks", ranks[1])["fits"]


def test_an_emulated_device_is_host_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device")
    found, _ = refused(SMALL, "--host-memory", "40KB", "--rates", "none")
    assert "this machine has no accelerator" in found["refused"]["message"]
    assert asked(SMALL, "--host-memory", "60KB", "--rates", "none")["fits"]


def test_a_terminal_of_80_columns_shows_every_digit(config: Path) -> None:
    code, shown = run(str(config), "--machine", "dgx-h100", "--dtype", "bf16", columns=80)
    assert code == 0 and "…" not in shown
    assert "weights" in shown and "fp32 masters" in shown and "activations, at most" in shown
    assert "peaks" in shown and "8 ranks (dgx-h100)" in shown


def test_a_described_machine_brings_memory_and_rates() -> None:
    for name, machine in MACHINES.items():
        found = asked(SMALL, "--machine", name, "--ranks", "16")["cluster"]
        assert (found["device_memory"], found["nodes"], found["ranks_per_node"]) == (machine.device_bytes, 2, 8)
        assert found["host_memory"] == pytest.approx(machine.host_bytes * 0.9 / machine.ranks_per_node, abs=8)
        assert found["rates"] == machine.rates.to_json()


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    code, shown = run(str(tmp_path))
    assert code == 2
    assert f"transformers {transformers.__version__} has no model_type 'no_such_type'" in shown
    assert "package.module:attribute" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "is no folder with a config.json"),
        (["nonsense"], "no id of the Hugging Face Hub (owner/model)"),
        ([SMALL, "--machine", "abacus"], "must be 'this' or one of rtx3090"),
        ([SMALL, "--rates", "fast"], "must be measured, none, one of"),
        ([SMALL, "--rates", "missing.json"], "missing.json"),
        ([SMALL, "--rates", str(MODELS / "llama3_70b.json")], "its keys are source"),
        ([SMALL, "--device-memory", "80 gigs"], "--device-memory"),
        ([SMALL, "--ranks", "12", "--machine", "dgx-h100"], "12 ranks do not fill nodes of 8"),
        ([SMALL, "--dtype", "int8"], "must be one of own"),
        ([SMALL, "--policy", "gpu", "--rates", "none"], "tensor_placement_policy"),
        ([SMALL, "--offload-optim-frac", "0.5", "--rates", "none"], "offload_optim_frac"),
        (["torch.nn:Identity", "--rates", "none"], "has no parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(Path(each).name for each in value),
)
def test_a_wrong_question_is_said(arguments: list[str], words: str) -> None:
    code, shown = run(*arguments)
    assert code == 2, shown
    assert words in " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())


@pytest.mark.parametrize(
    ("name", "ranks", "fits"),
    [
        pytest.param("llama3_70b", 512, True),
        pytest.param("llama3_70b", 8, True, marks=pytest.mark.soak),
        pytest.param("deepseek_v3_671b", 8, False, marks=pytest.mark.soak),
        pytest.param("deepseek_v3_671b", 512, True, marks=pytest.mark.soak),
    ],
)
def test_the_largest_public_models_are_planned_in_seconds(
    name: str, ranks: int, fits: bool, record_property: Callable[[str, object], None]
) -> None:
    """In a process of its own: 20 seconds of work, 4 GiB."""
    options = ["--ranks", str(ranks), "--machine", "dgx-h100", "--dtype", "bf16", "--activation-checkpointing"]
    command = [sys.executable, "-m", "gemini.cli.app", "plan", str(MODELS / f"{name}.json"), *options, "--json"]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begun
    assert done.returncode == (0 if fits else 1), done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == {"deepseek_v3_671b": 671_026_404_352, "llama3_70b": 70_553_706_496}[name]
    assert found["fits"] == fits
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert worked < 20
    assert after.ru_maxrss < 4 * 2**20, "KiB, of the largest child so far"
    record_property("shown", f"{name} on {ranks} ranks: {seconds:.1f} s, {worked:.1f} s of work")


# -- The first line, and commands to paste.


LLAMA_7B = (str(MODELS / "llama2_7b.json"), "--dtype", "bf16", "--device-memory", "24GB", "--host-memory")


def pasted(command: str) -> dict[str, Any]:
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("gemini", "plan")
    return asked(*arguments)


def test_the_first_line_says_whether_it_fits_or_what_is_in_the_way() -> None:
    code, shown = run(*LLAMA_7B, "128GB")
    assert code == 1
    first = shown.splitlines()[0]
    assert first.startswith("does not fit: activations of 42.5 GB for 1 × 4,096 tokens are what is in the way")
    assert not re.search(r"\d{7,}B|GiB|bytes \(", shown), "one unit on a page, and no raw bytes"
    code, shown = run(*LLAMA_7B, "128GB", "--activation-checkpointing")
    assert code == 0 and shown.startswith("fits: 22.9 GB of 24 GB on the device, 76.5 GB of 128 GB on the host")


def test_where_both_are_short_checkpointing_is_advised_with_host_memory_and_with_a_disk_as_commands() -> None:
    found, _ = refused(*LLAMA_7B, "32GB")
    assert "With checkpointing the host is short, too" in found["in_the_way"]
    with_host, with_disk = found["commands"][:2]
    assert "--activation-checkpointing" in with_host and re.search(r"--host-memory 7[67][\d.]*GB", with_host)
    assert (
        "--activation-checkpointing" in with_disk and "--host-memory 32GB" in with_disk and "--disk-memory" in with_disk
    )
    assert pasted(with_host)["fits"] and pasted(with_disk)["fits"]


@pytest.mark.parametrize(
    ("machine", "gb"), [("rtx4090", 24), ("rtx3090", 24), ("a10", 24), ("l40s", 48), ("a100-40gb", 40)]
)
def test_a_machine_of_one_device_is_one_rank_with_its_host_and_tokens_a_second(machine: str, gb: int) -> None:
    found = asked(SMALL, "--machine", machine)
    assert found["cluster"]["ranks"] == 1 and found["cluster"]["device_memory"] == gb * 10**9
    assert found["cluster"]["host_memory"] > 50 * 10**9
    modelled = found["modelled"]
    assert 0 < modelled["tokens_per_s_without_overlap"] <= modelled["tokens_per_s_with_all_overlap"]
    assert "tokens/s" in run(SMALL, "--machine", machine)[1]
