"""What `gemini` exports: one sorted list, every name there, and one version."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from scikit_build_core.metadata import regex

import gemini

ROOT = Path(__file__).resolve().parents[1]


def test_the_list_of_names_is_sorted_and_holds() -> None:
    assert gemini.__all__ == sorted(set(gemini.__all__))
    for name in gemini.__all__:
        assert (getattr(gemini, name).__doc__ or "").strip(), f"gemini.{name} has no docstring"


def test_one_place_has_the_version() -> None:
    """pyproject.toml reads it, through the build backend, from where users read it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    source = project["tool"]["scikit-build"]["metadata"]["version"]
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    settings = {"input": str(ROOT / source["input"])}
    assert source["provider"] == regex.__name__
    assert regex.dynamic_metadata("version", settings) == gemini.__version__


@pytest.mark.parametrize("name", ["optim", "sharding"])
def test_a_file_that_hides_one_of_our_packages_is_named(name: str, tmp_path: Path) -> None:
    in_the_way = tmp_path / f"{name}.py"
    in_the_way.write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import gemini"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"gemini needs its own package {name!r}, but Python finds {in_the_way}" in done.stderr
