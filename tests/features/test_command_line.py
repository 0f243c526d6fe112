"""`gemini estimate`: what it prints, and what it says of names that are no models."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

import gemini
from gemini import estimate_memory
from gemini.cli.app import app
from tests.zoo.mlp import Mlp

SMALL = "tests.zoo.mlp:Mlp"
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, columns: int = 200) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": str(columns)})
    # Lines of progress on stderr, where the machine is busy, come behind the answer.
    return done.exit_code, done.stdout + done.stderr


def test_seven_billion_parameters_take_the_published_bytes(tmp_path: Path) -> None:
    """ZeRO's table for 7 B parameters in fp32 with Adam on 8 ranks: 112, 63, 38.5 and 14 GB, 16 bytes a parameter."""
    config = LlamaConfig(num_hidden_layers=32, vocab_size=32_000, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    code, shown = run(str(tmp_path), "--dtype", "fp32", "--ranks", "8", "--json")
    assert code == 0
    found = json.JSONDecoder().raw_decode(shown)[0]
    numel = found["0"]["parameters"]
    assert numel == 6_738_415_616
    for stage, published in (("0", 112), ("1", 63), ("2", 38.5), ("3", 14)):
        state = sum(found[stage][tier][kind] for tier in ("device", "host") for kind in ("param", "grad", "optim"))
        assert state / 1e9 == pytest.approx(published * numel / 7e9, rel=2e-3)


def test_stage_3_is_seen_to_need_less_than_stage_2(tmp_path: Path) -> None:
    """Without a budget both fill the device alike: gathered weights stay where there is room for them."""
    config = LlamaConfig(num_hidden_layers=32, vocab_size=32_000, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    _, shown = run(str(tmp_path), "--dtype", "fp32")
    rows = [line.split() for line in shown.splitlines() if line.strip()[:1] in tuple("0123")]
    state, least, device = ([float(row[column]) for row in rows] for column in (5, 6, 7))
    assert state == [107.81, 60.65, 37.06, 13.48]
    assert least[3] < 16 < least[2] and device[3] == device[2]
    assert "stage 3 then keeps 22.75 GB more of gathered weights" in shown
    assert "with all states on the host a device needs 2.31 GB at stage 3" in shown


def test_help_needs_no_torch() -> None:
    code = "import sys; from gemini.cli.app import app; print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_table_has_a_row_for_every_stage() -> None:
    code, shown = run(SMALL, "--ranks", "2")
    assert code == 0
    numel = sum(parameter.numel() for parameter in Mlp().parameters())
    assert f"{SMALL}: {numel:,} parameters, 2 rank(s) (--ranks); KB (10**3 bytes) on each" in shown
    rows = [line.split() for line in shown.splitlines() if line.strip()[:1] in tuple("0123")]
    assert [row[0] for row in rows] == list("0123")
    assert {len(row) for row in rows} == {9}


def test_a_terminal_of_80_columns_shows_every_digit(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    config.save_pretrained(tmp_path)
    code, shown = run(str(tmp_path), "--ranks", "1", columns=80)
    assert code == 0
    assert "GB (10**9 bytes)" in shown
    assert "…" not in shown
    weights = 4 * json.JSONDecoder().raw_decode(run(str(tmp_path), "--json", "--stage", "0")[1])[0]["0"]["parameters"]
    assert f"  {weights / 1e9:.2f}  " in shown


def test_a_terminal_of_60_columns_has_a_column_for_every_stage() -> None:
    _, wide = run(SMALL, "--ranks", "3", columns=120)
    _, narrow = run(SMALL, "--ranks", "3", columns=60)

    def cells(shown: str) -> list[list[str]]:
        table = shown.split("\nstate:")[0].splitlines()[1:]
        return [line.replace("at least", "at_least").split() for line in table if line.strip(" ─")]

    assert cells(narrow) == [list(row) for row in zip(*cells(wide), strict=True)]
    assert max(map(len, narrow.split("\nstate:")[0].splitlines()[1:])) <= 60


def test_nothing_is_allocated_for_70_billion_parameters(tmp_path: Path) -> None:
    """Its fp32 weights would be 282 GB; the process is as large as one that only imports the libraries."""
    config = LlamaConfig(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    config.save_pretrained(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, _ = run(str(tmp_path), "--dtype", "bf16")
    assert code == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_what_a_module_of_ones_own_raises_is_said_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def broken(): raise RuntimeError('no [data] here')\n"
        "def reads(): return float(nn.Linear(2, 2).weight.detach().sum())\n"
        "def lazy(): return nn.Sequential(nn.LazyLinear(4))\n"
        "class Outer: inner = nn.Identity\n"
    )
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    for name, words in (
        ("own:broken", "'own:broken' cannot be made of tensors without values: RuntimeError: no [data] here ("),
        ("own:broken", f"({tmp_path / 'own.py'}, line 2). Name a function that only builds the model"),
        ("own:reads", f"({tmp_path / 'own.py'}, line 3)"),
        ("own:lazy", "has no shape for '0.weight' before its first forward"),
        ("own:", "names no attribute of a module: write package.module:attribute"),
        (":own", "names no attribute of a module"),
        ("ends:model", f"'ends:model' cannot be imported: SystemExit: 3 ({tmp_path / 'ends.py'}, line 2)"),
    ):
        code, shown = run(name)
        assert code == 2, shown
        assert words in shown
    assert run("own:Outer.inner")[0] == 0


def test_bytes_are_those_of_the_library() -> None:
    _, shown = run(SMALL, "--ranks", "3", "--stage", "2", "--dtype", "bf16", "--policy", "cpu", "--json")
    its = estimate_memory(Mlp(), world_size=3, stage=2, dtype=torch.bfloat16, tensor_placement_policy="cpu")
    bytes_of = {"device": its.device, "least_device_bytes": its.least_device_bytes, "host": its.host}
    assert json.JSONDecoder().raw_decode(shown)[0] == {"2": {"parameters": its.num_parameters, **bytes_of}}


def test_states_of_another_optimizer_than_adam_are_counted() -> None:
    _, shown = run(SMALL, "--ranks", "1", "--stage", "3", "--optim-states", "1", "--json")
    its = estimate_memory(Mlp(), optim_states=1)
    assert json.JSONDecoder().raw_decode(shown)[0]["3"]["device"] == its.device
    assert 2 * its.device["optim"] == estimate_memory(Mlp()).device["optim"]


def test_moments_of_fewer_bits_are_counted_by_name() -> None:
    _, shown = run(SMALL, "--ranks", "1", "--stage", "3", "--optimizer", "bf16", "--json")
    device = json.JSONDecoder().raw_decode(shown)[0]["3"]["device"]
    assert device == estimate_memory(Mlp(), optimizer="bf16").device
    assert device["optim"] < 0.6 * estimate_memory(Mlp()).device["optim"]
    code, shown = run(SMALL, "--optimizer", "lion")
    assert code == 2 and "optimizer must be one of adam, 8bit, bf16, sgd, found 'lion'" in shown


def test_a_budget_that_is_too_small_is_said_and_an_error_if_no_stage_fits() -> None:
    code, shown = run(SMALL, "--model-data-memory", "1KiB")
    assert code == 1
    lines = [line for line in shown.splitlines() if not line.endswith(" ...")]
    assert [line.partition(" needs ")[0] for line in lines] == [
        f"stage {stage}: device: tensor_placement_policy='auto'" for stage in range(4)
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "is no folder with a config.json"),
        (["no_such_module:Model"], "cannot be imported"),
        (["tests.zoo.mlp:inputs"], "is called without arguments"),
        (["tests.zoo.mlp:WIDTH"], "is int, neither a module"),
        (["missing.json"], "does not exist"),
        ([SMALL, "--dtype", "int8"], "must be one of own"),
        ([SMALL, "--policy", "gpu"], "tensor_placement_policy"),
        ([SMALL, "--ranks", "0"], "--ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_is_no_model_is_said(arguments: list[str], words: str) -> None:
    code, shown = run(*arguments)
    assert code == 2
    assert words in shown


def test_a_file_that_is_no_config_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    code, shown = run(str(tmp_path))
    assert code == 2
    assert "is no config of a Hugging Face model" in shown


# -- The front door: versions, help, and what a command says while it works.


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_the_version_and_help_are_there_without_a_script_on_path() -> None:
    assert command("-m", "gemini", "--version").stdout == f"gemini {gemini.__version__}\n"
    done = command("-m", "gemini", "-h")
    assert done.returncode == 0
    for name in ("plan", "estimate", "doctor", "checkpoint"):
        assert name in done.stdout


def test_a_command_that_takes_long_says_what_it_does_on_stderr_and_its_answer_stays_pure(tmp_path: Path) -> None:
    """The model waits until the line has been read, however long that takes."""
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "from torch import nn\n"
        "def model():\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "    return nn.Linear(8, 8)\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-m", "gemini", "estimate", "slow:model", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with started:
        assert started.stderr is not None and started.stdout is not None
        said = iter(started.stderr.readline, "")
        assert any("reading slow:model ..." in line for line in said)
        (tmp_path / "go").touch()
        assert json.loads(started.stdout.read())["3"]["parameters"] == 72


@pytest.mark.parametrize(
    "command",
    [
        ["plan", SMALL],
        ["estimate", SMALL],
        ["doctor"],
        ["checkpoint", "inspect", "."],
        ["checkpoint", "verify", "."],
        ["checkpoint", "export", ".", "out"],
        ["checkpoint", "import", ".", "out"],
    ],
    ids=" ".join,
)
def test_a_terminal_is_told_what_is_waited_for_before_torch_is_there(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was asked for')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "FORCE_COLOR": "1"}
    call = [sys.executable, "-m", "gemini", *command]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    before, asked, _ = done.stderr.partition("torch was asked for")
    assert asked and "loading torch" in before, done.stderr
