"""`gemini estimate`: what it prints, and what it says of names that are no models."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from gemini import estimate_memory
from gemini.cli.app import app
from tests.zoo.mlp import Mlp

SMALL = "tests.zoo.mlp:Mlp"


def run(*arguments: str, columns: int = 200) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": str(columns)})
    return done.exit_code, done.output


def test_seven_billion_parameters_take_the_published_bytes(tmp_path: Path) -> None:
    """ZeRO's table for 7 B parameters in fp32 with Adam on 8 ranks: 112, 63, 38.5 and 14 GB, 16 bytes a parameter."""
    config = LlamaConfig(num_hidden_layers=32, vocab_size=32_000, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    code, shown = run(str(tmp_path), "--dtype", "fp32", "--ranks", "8", "--json")
    assert code == 0
    found = json.loads(shown)
    numel = found["0"]["parameters"]
    assert numel == 6_738_415_616
    for stage, published in (("0", 112), ("1", 63), ("2", 38.5), ("3", 14)):
        state = sum(found[stage][tier][kind] for tier in ("device", "host") for kind in ("param", "grad", "optim"))
        assert state / 1e9 == pytest.approx(published * numel / 7e9, rel=2e-3)


def test_a_table_has_a_row_for_every_stage() -> None:
    code, shown = run(SMALL, "--ranks", "2")
    assert code == 0
    numel = sum(parameter.numel() for parameter in Mlp().parameters())
    assert f"{SMALL}: {numel:,} parameters, 2 rank(s); KB (10**3 bytes) on each" in shown
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
    weights = 4 * json.loads(run(str(tmp_path), "--json", "--stage", "0")[1])["0"]["parameters"]
    assert f"  {weights / 1e9:.2f}  " in shown


def test_bytes_are_those_of_the_library() -> None:
    _, shown = run(SMALL, "--ranks", "3", "--stage", "2", "--dtype", "bf16", "--policy", "cpu", "--json")
    its = estimate_memory(Mlp(), world_size=3, stage=2, dtype=torch.bfloat16, tensor_placement_policy="cpu")
    assert json.loads(shown) == {"2": {"parameters": its.num_parameters, "device": its.device, "host": its.host}}


def test_a_budget_that_is_too_small_is_said_and_an_error_if_no_stage_fits() -> None:
    code, shown = run(SMALL, "--model-data-memory", "1KiB")
    assert code == 1
    assert [line.partition(" needs ")[0] for line in shown.splitlines()] == [
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
