"""Python snippets in README and docs run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "snippet", "exec"), {})
    assert "Traceback" not in capsys.readouterr().out


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
    pytest.param(row, id=f"{page}-{row[2:40].strip()}")
    for page in ("assumptions", "coming_from")
    for row in re.findall(r"^\| .*$", (ROOT / "docs" / f"{page}.md").read_text(), re.M)[1:]
]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_the_test_that_checks_it(row: str) -> None:
    """In a comment at its end, which no page shows: `<!-- tests/file.py::test_name -->`."""
    found = re.search(r"<!-- (tests/[\w/]+\.py)::(test_\w+) --> \|$", row)
    assert found is not None, f"no test is named at the end of: {row}"
    path, name = found.groups()
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path} has no {name}"
