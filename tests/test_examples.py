"""The examples as a user runs them: as scripts, with tiny settings."""

import dataclasses
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from tests.harness.on_ranks import in_soak
from tests.harness.ranks import RankPool

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train_gpt.py"
# small enough for seconds, deep enough for a third of the state to hold two chunks and two gradients
TINY = (
    *("--layers", "10", "--width", "32", "--heads", "2", "--vocabulary", "257", "--context", "32"),
    *("--batch", "2", "--steps", "6", "--lr", "1e-2", "--corpus-bytes", "64KiB", "--chunk-size", "8704"),
    *("--sample", "4", "--timeout", "40"),
)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The script with `flags`, from another folder, on a wide page without colours."""
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "FORCE_COLOR"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT.parent)


def numbers(pattern: str, output: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, output)]


def test_help_names_every_flag(example: ModuleType) -> None:
    done = CliRunner().invoke(example.app, ["--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    flags = {flag for flag in TINY if flag.startswith("--")}
    flags |= {"--demo", "--ranks", "--device-memory", "--model-data-memory", "--policy", "--stage", "--dtype", "--seed"}
    assert not [flag for flag in sorted(flags) if f"{flag} " not in done.stdout], done.stdout


def test_a_size_without_a_unit_is_refused_before_anything_is_done(example: ModuleType) -> None:
    done = CliRunner().invoke(example.app, ["--model-data-memory", "8 gigs"])
    assert done.exit_code == 2
    assert not done.stdout
    assert "--model-data-memory" in done.stderr
    assert "'8 gigs' is not a size" in done.stderr


@pytest.mark.soak
def test_one_rank_says_what_it_does_trains_and_reports(tmp_path: Path) -> None:
    done = run(*TINY, "--cache", str(tmp_path), "--policy", "cpu")
    assert done.returncode == 0, done.stderr
    said = [line.split(":")[0] for line in done.stdout.splitlines()]
    order = [said.index(what) for what in ("corpus", "tokenizer", "model", "ranks", "budget", "loss", "state hash")]
    assert order == sorted(order), done.stdout
    losses = numbers(r"step +\d+ of 6: loss ([\d.]+)", done.stdout)
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "def " in done.stdout  # the sample's prompt
    assert re.search(r"^host +optim ", done.stdout, re.MULTILINE)
    assert re.search(r"^state hash: [0-9a-f]{64}$", done.stdout, re.MULTILINE)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_the_demo_has_the_same_bits_on_two_ranks_with_a_third_of_the_memory() -> None:
    done = run("--demo", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = re.findall(r"^state hash: ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    evictions = numbers(r"(\d+) evictions", done.stdout)
    assert evictions[0] > 0
    assert "(33%)" in done.stdout


@pytest.mark.soak
def test_a_budget_that_is_too_small_ends_all_ranks_with_one_message() -> None:
    done = run("--ranks", "2", *TINY, "--model-data-memory", "1KiB")
    assert done.returncode == 1
    assert done.stdout.count("BudgetError") == 1, done.stdout
    assert "error: rank 0, 1: BudgetError: device:" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The script as a module, to try what a good core never gives it."""
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))  # where a script finds its neighbours
        patch.setitem(sys.modules, "train_gpt", module)  # dataclasses and typer look their annotations up there
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"state_hash": "b"}, "state hashes differ"),
        ({"losses": [2.0, 1.5]}, "losses differ from step 2 on"),
        ({"num_evictions": 0}, "rank 1 evicted nothing"),
        ({"peak_device_bytes": 101}, "rank 1 held 101 bytes, its budget is 100"),
    ],
)
def test_the_demo_fails_for_every_broken_promise(
    example: ModuleType, change: dict[str, object], complaint: str | None
) -> None:
    numbers = {"num_evictions": 7, "budget_bytes": 100, "peak_device_bytes": 100, "peak_host_bytes": 0}
    words = {"state_hash": "a", "sample": "", "memory_report": ""}
    fields = {"losses": [2.0, 1.0], "tokens_per_s": 1.0, **words, **numbers}
    good = [example.Result(rank=rank, **fields) for rank in range(2)]
    changed = [good[0], dataclasses.replace(good[1], **change)]
    wrong = example.broken_promises(changed, good, 100)
    assert (wrong == []) if complaint is None else (len(wrong) == 1 and complaint in wrong[0])


def run_on_ranks(script: str, *flags: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """An example under torchrun, as its help says."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    command = [*launcher, str(ROOT / "examples" / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.soak
def test_ranks_of_the_mixture_of_experts_wake_different_ones() -> None:
    flags = ("--steps", "30", "--layers", "2", "--experts", "8", "--length", "16", "--batch", "1", "--lr", "1e-2")
    done = run_on_ranks("moe.py", *flags, "--model-data-memory", "3600KiB")
    (first,) = numbers(r"loss: ([\d.]+) at first", done.stdout)
    (last,) = numbers(r"([\d.]+) after 30 steps", done.stdout)
    assert last < first - 0.5
    used = re.findall(r"rank \d used in its last step: (.*)", done.stdout)
    assert len(used) == 2 and used[0] != used[1]


def run_here(rank: int, world_size: int, script: str, *flags: str) -> None:
    """An example in a rank that has imported torch already, in the environment that torchrun gives one."""
    sys.argv = [script, *flags]
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")


@pytest.mark.parametrize("by_torchrun", [False, *in_soak(True)])
def test_the_documented_gpt2_script_runs_in_fp16_with_everything_offloaded(ranks: RankPool, by_torchrun: bool) -> None:
    if by_torchrun:
        said = run_on_ranks("colossal_gpt2.py", "--steps", "6").stderr
    else:
        arguments = ("colossal_gpt2.py", "--steps", "6")
        exits = ranks(2).run(run_here, *arguments, fresh=True, forked=True, init_group=False, env={"COLUMNS": "200"})
        assert [each.exitcode for each in exits] == [0, 0], exits
        said = "".join(each.output for each in exits)
    losses = numbers(r"Loss: ([\d.]+)", said)
    assert len(losses) == 6, "rank 0 alone reports"
    assert losses[-1] < losses[0] < 7
    (num_parameters,) = numbers(r"(\d+) parameters", said)
    host = re.search(r"^host +param +([\d.]+) (\w+)", said, re.MULTILINE)
    assert host is not None, said
    assert num_parameters > 100_000
    assert not re.search(r"^host +grad +[1-9]", said, re.MULTILINE), "gradients rest where the parameters were"


@pytest.mark.soak
def test_a_small_neox_is_fine_tuned_with_a_frozen_trunk(tmp_path: Path) -> None:
    flags = ("--steps", "25", "--layers", "4", "--width", "32", "--length", "32", "--lr", "1e-2")
    said = run_on_ranks("finetune_neox.py", *flags, "--model-data-memory", "700KiB").stdout
    trained, frozen = (int(count.replace(",", "")) for count in re.findall(r"([\d,]+) (?:parameters )?are", said))
    assert frozen > 2 * trained
    (first,) = numbers(r"loss: ([\d.]+) at first", said)
    (last,) = numbers(r"([\d.]+) after 25 steps", said)
    assert last < first - 0.5


@pytest.mark.soak
def test_adapters_learn_while_the_trunk_holds_nothing_but_its_weights() -> None:
    flags = ("--pretraining-steps", "20", "--steps", "40", "--layers", "2", "--width", "32", "--length", "32")
    said = run_on_ranks("lora.py", *flags, "--lr", "4e-3", "--model-data-memory", "1MiB").stdout
    (trained, every) = map(int, re.findall(r"adapters: (\d+) of (\d+) parameters", said)[0])
    assert trained < every / 4
    first, last = numbers(r"mean loss ([\d.]+) in", said)[1], numbers(r"([\d.]+) in the last of", said)[1]
    assert last < first - 0.05
    grads = re.findall(r"^device +grad +(.*?)  ", said, re.MULTILINE)
    assert len(grads) == 2 and grads[0] != grads[1]
    (saved,) = numbers(r"to save: \d+ tensors of (\d+) bytes", said)
    assert saved == 4 * trained
