"""What contributors are told to run exists, and the same versions stand everywhere."""

import importlib.util
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import conftest
from tests.built_site import loaded_from_elsewhere
from tests.check import CHECKED, LEFT_OUT

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
NAMING_PAGES = ["CONTRIBUTING.md", "README.md"] + [
    f"docs/{page}.md" for page in ("testing", "architecture", "step", "planning", "decisions", "benchmarks", "log")
]
PINS = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))


@pytest.mark.parametrize("page", NAMING_PAGES)
def test_pages_name_targets_and_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    assert set(re.findall(r"`make ([a-z]+)`", text)) <= TARGETS
    code = "\n".join(re.findall(r"`+([^`]+)`+", text))
    paths = set(re.findall(r"(?:tests|docs|gemini|benchmarks|examples)/[\w/]+\.\w+", code))
    named = {path for path in paths if not re.search(r"FEATURE", path)}
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing


def test_every_target_is_told_in_help_and_in_contributing() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text()
    helps = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in TARGETS - {"help", "clean"}:
        assert f"make {target} " in helps, target
    for target in TARGETS - {"help", "clean", "demo", "setup"}:
        assert f"| `make {target}` |" in told, target


def test_the_quick_tests_are_there_and_start_no_ranks() -> None:
    for path in (*CHECKED, *LEFT_OUT):
        assert (ROOT / path).exists(), path
        assert not path.startswith(("tests/dist", "tests/gpu"))
    folders = [file for path in CHECKED for file in (ROOT / path).glob("test_*.py")]
    files = [*folders, *(ROOT / path for path in CHECKED if path.endswith(".py"))]
    assert not [file.name for file in files if re.search(r"RankPool", file.read_text())]
    assert "not soak and not ranks" in (ROOT / "tests" / "check.py").read_text()


def test_the_files_that_begin_first_are_there() -> None:
    assert [name for name in conftest.LONG if not (ROOT / name).is_file()] == []


def test_hooks_before_a_commit_run_the_checkouts_own_tools() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "mypy"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in hooks:
        python, dash_m, module, *arguments = shlex.split(hook["entry"])
        assert (python, dash_m, hook["language"]) == (".venv/bin/python", "-m", "system")
        assert importlib.util.find_spec(module) is not None, module
        assert module in makefile
        done = subprocess.run([ROOT / python, "-m", module, *arguments, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_runs_what_the_checkout_has() -> None:
    for job in WORKFLOW["jobs"].values():
        for command in commands(job):
            program, *arguments = shlex.split(command.replace("${{", "").replace("}}", ""))
            if program == "make":
                assert set(arguments) <= TARGETS
            elif program not in ("python", "sed"):
                assert (ROOT / program).stat().st_mode & 0o111, program
    assert commands(WORKFLOW["jobs"]["all"])[-1] == ".ci/run"


def test_the_workflow_tries_the_versions_that_the_project_names() -> None:
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    classified = [found[1] for each in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", each))]
    assert matrix["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"
    floor = next(each for each in PROJECT["dependencies"] if each.startswith("torch"))
    lowest, newest = matrix["torch"]
    assert floor == f"torch>={lowest.removesuffix('.0')}"
    assert newest == PINS["torch"]


def test_what_builds_the_docs_is_pinned() -> None:
    for requirement in PROJECT["optional-dependencies"]["docs"]:
        assert re.match(r"[\w-]+", requirement)[0] in PINS  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('<script src="https://unpkg.com/a.js"></script>', True),
        ('<link href="//fonts.example/css" rel="stylesheet">', True),
        ("@font-face { src: url(https://fonts.example/a.woff2) }", True),
        ('<a href="https://arxiv.org/abs/1910.02054">ZeRO</a>', False),
        ('<script src="assets/bundle.js"></script>', False),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_seen(text: str, is_found: bool) -> None:
    assert bool(loaded_from_elsewhere(text)) == is_found
