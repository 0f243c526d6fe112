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
