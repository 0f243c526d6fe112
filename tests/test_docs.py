"""Python snippets in README and docs run as they stand."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from typer.testing import CliRunner

import gemini
from gemini.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Snippets for trainers set what every later one of the process reads: state, and names in the environment."""
    with mock.patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)


@pytest.mark.parametrize("code", SNIPPETS)
@pytest.mark.usefixtures("leaves_nothing")
def test_a_snippet_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, "snippet", "exec"), names)
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        (mark,) = test.pytestmark  # parametrized once
        for value in mark.args[1]:
            test(value)
    assert "Traceback" not in capsys.readouterr().out


def test_every_exported_name_stands_on_one_page() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    found = re.findall(r"^::: gemini\.(\w+)$", pages, re.M)
    assert sorted(found) == gemini.__all__


def test_every_page_is_in_the_sites_table_of_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r": ([\w/]+\.md)$", contents, re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w/.]+\.md)?(?:#([\w-]+))?\)", page.read_text()):
        linked = page if not target else page.parent / target
        assert linked.exists(), f"{target} is not there"
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
        anchors = {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in headings}
        assert not anchor or anchor in anchors, f"{linked.name} has no heading for #{anchor}"


def test_readme_names_only_what_is_there() -> None:
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert tree is not None
    folder = ROOT
    for line in tree[1].splitlines():
        name = line.split()[0]
        folder = ROOT if not line.startswith(" ") else folder
        path = folder / name
        assert path.exists(), f"README's tree names {name}"
        if not line.startswith(" "):
            folder = path


ROWS = [
    pytest.param(row, id=f"{page}-{row[2:60].strip()}")
    for page in ("assumptions", "coming_from")
    for row in re.findall(r"^\| .*$(?!\n\|-)", (ROOT / "docs" / f"{page}.md").read_text(), re.M)  # no table's head
]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_the_test_that_checks_it(row: str) -> None:
    """In a comment at its end, which no page shows: `<!-- tests/file.py::test_name -->`."""
    found = re.search(r"<!-- (tests/[\w/]+\.py)::(test_\w+) --> \|$", row)
    assert found is not None, f"no test is named at the end of: {row}"
    path, name = found.groups()
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path} has no {name}"


README = (ROOT / "README.md").read_text()


@pytest.mark.usefixtures("leaves_nothing")
def test_the_training_of_readme_is_saved_gone_on_with_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first = next(iter(re.findall(r"```python\n(.*?)```", README, re.S)))
    exec(compile(first, "snippet", "exec"), names)
    before = gemini.state_hash(names["model"])
    (saves,) = re.findall(r"```py\n(.*?)```", README, re.S)
    exec(compile(saves, "snippet", "exec"), names)
    assert gemini.state_hash(names["model"]) == before
    (command,) = re.findall(r"^gemini (checkpoint export [\w -]+?) +#", README, re.M)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert sorted(load_file("my-model/model.safetensors")) == sorted(names["module"].state_dict())


def test_the_ranks_of_readme_train_with_torchrun(tmp_path: Path) -> None:
    (script,) = [each for each in re.findall(r"```python\n(.*?)```", README, re.S) if "launch_from_torch" in each]
    (command,) = re.findall(r"^torchrun (.*) train.py$", README, re.M)
    (tmp_path / "train.py").write_text(script)
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split(), "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^step \d: loss [\d.]+$", done.stdout, re.M)) == 10
