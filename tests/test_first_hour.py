"""examples/first_hour.ipynb as a reader runs it: its cells, one after the other, in one namespace."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "first_hour.ipynb"


def cells(kind: str) -> list[str]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def test_the_notebook_runs_and_shows_a_loss_that_falls_within_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(cells("code")):
        exec(compile(source, f"cell {number}", "exec"), names)
    assert names["losses"][-1] < names["losses"][0] - 1
    said = capsys.readouterr().out
    assert "tokens/s" in said and "The minimum of model data" in said and "def " in said
    ledger = names["model"].chunk_manager.memory.device.ledger
    assert ledger.peak_bytes <= names["budget"] < names["estimate"].state_bytes // 2
    assert names["traced"].picture.exists()


def test_the_notebook_has_no_outputs_of_an_earlier_run_and_no_commands_of_a_shell() -> None:
    content = json.loads(NOTEBOOK.read_text())
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in content["cells"])
    assert not any(line.startswith(("%", "!")) for source in cells("code") for line in source.splitlines())
