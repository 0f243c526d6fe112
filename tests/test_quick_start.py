"""docs/quick_start.md as a reader follows it: its files, its commands in order, and what it says they print."""

import io
import logging
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gemini
from gemini.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "quick_start.md").read_text()
FILES = dict(re.findall(r'```python title="(.*?)"\n(.*?)```', PAGE, re.S))
COMMANDS = [command.splitlines()[0] for command in re.findall(r"```console\n\$ (.*?)```", PAGE, re.S)]


def shape(text: str) -> list[str]:
    """Lines without their numbers, which differ from machine to machine, and without their spacing."""
    return [" ".join(re.sub(r"[\d.,]+", "#", line).split()) for line in text.splitlines() if line.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    return tmp_path


def run(command: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What the command prints. One process runs in this one, several by their launcher."""
    program, *arguments = shlex.split(command)
    if program == "gemini":
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
        assert done.exit_code == 0, done.output
        return done.output
    if program == "python":
        gemini.get_dist_logger()  # has its own handler before this one comes
        log = logging.StreamHandler(io.StringIO())  # the logger writes where stderr was when it was made
        logging.getLogger("gemini").addHandler(log)
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        finally:
            logging.getLogger("gemini").removeHandler(log)
        return capfd.readouterr().out + log.stream.getvalue()
    assert program == "torchrun"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run([*launcher, *arguments], check=True, timeout=120, env=environment)
    captured = capfd.readouterr()
    return captured.out + captured.err


def test_the_page_runs_as_it_stands(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert [command.split()[0] for command in COMMANDS] == ["gemini", "python", "torchrun"]
    printed = [run(command, capfd) for command in COMMANDS]
    (shown,) = re.findall(r"```console\n\$ gemini .*?\n(.*?)```", PAGE, re.S)
    assert shape(printed[0]) == shape(shown)

    quoted = [shape(block) for block in re.findall(r"```text\n(.*?)```", PAGE, re.S)]
    for block, output in zip(quoted, [printed[1]] * 3 + [printed[2]], strict=True):
        # a line of the log has its time and rank before what the page quotes
        missing = [line for line in block if not any(found.endswith(line) for found in shape(output))]
        assert not missing
    steps = [[int(step) for step in re.findall(r"step (\d+): loss", output)] for output in printed[1:]]
    assert steps == [[5, 10, 15, 20], [25, 30, 35, 40]]  # the second run goes on from the first one's checkpoint
    losses = [float(loss) for output in printed[1:] for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert losses[-1] < losses[4] < losses[0]
    (peak,) = re.findall(r"device +total +\S+ MiB +(\S+) MiB", printed[1])
    assert float(peak) <= 4
