"""What `gemini` exports: one sorted list, every name there, and one version."""

import ast
import contextlib
import dataclasses
import doctest
import enum
import functools
import inspect
import io
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scikit_build_core.metadata import regex

import gemini

ROOT = Path(__file__).resolve().parents[1]


def test_the_list_of_names_is_sorted_and_holds() -> None:
    assert gemini.__all__ == sorted(set(gemini.__all__))
    for name in gemini.__all__:
        assert (getattr(gemini, name).__doc__ or "").strip(), f"gemini.{name} has no docstring"


def test_the_stub_exports_every_name_explicitly_and_no_other() -> None:
    """Type checkers take a name of a stub for exported only if it is imported as itself."""
    stub = ast.parse((ROOT / "gemini" / "__init__.pyi").read_text())
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    assert [alias.name for each in imports for alias in each.names if alias.asname != alias.name] == []
    declared = {ast.unparse(each) for each in stub.body if not isinstance(each, ast.ImportFrom)}
    assert declared == {"__version__: str", "__all__: list[str]"}


@pytest.mark.soak
def test_type_checkers_find_every_name_where_it_is_imported_from(tmp_path: Path) -> None:
    """And no other: a name that is misspelt is an error of theirs, too."""
    script = tmp_path / "script.py"
    script.write_text(f"from gemini import {', '.join(gemini.__all__)}\nfrom gemini import ShardedModl\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT)})
    (found,) = (line for line in done.stdout.splitlines() if "error:" in line)
    assert 'has no attribute "ShardedModl"' in found


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
    # an editable install's finder comes before sys.path, and would find our package whatever hides it there
    finders = "[f for f in sys.meta_path if not type(f).__name__.startswith('ScikitBuild')]"
    paths = [str(tmp_path), str(ROOT)]
    code = f"import sys; sys.meta_path[:] = {finders}; sys.path[:0] = {paths!r}; import gemini"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"gemini needs its own package {name!r}, but Python finds {in_the_way}" in done.stderr


COLLECTIVE = re.compile(r"ollective|\b[Ll]ocal\b|[Ee]very rank")
RAISES = re.compile(r"\b[Rr]aises?\b|\bNot possible\b")
SELF = {"self", "cls", "args", "kwargs", "unknown"}


def documented() -> Iterator[tuple[str, Any, inspect.Signature]]:
    """Exported functions, classes that are built with arguments, and their public methods."""
    for name in gemini.__all__:
        thing = getattr(gemini, name)
        if not isinstance(thing, type):
            yield name, thing, inspect.signature(thing)
            continue
        told_by_fields = dataclasses.is_dataclass(thing) or issubclass(thing, (Exception, enum.Enum))
        if "__init__" in vars(thing) and not told_by_fields and thing is not gemini.PlacementPolicy:
            yield name, thing, inspect.signature(thing)
        for owner in thing.__mro__ if name.startswith("Sharded") else (thing,):
            for member, value in vars(owner).items():
                ours = owner.__module__.split(".")[0] in ("gemini", "optim")
                if ours and inspect.isfunction(value) and not member.startswith("_") and not told_by_fields:
                    yield f"{name}.{member}", value, inspect.signature(value)


DOCUMENTED = [pytest.param(*each, id=each[0]) for each in documented()]


@pytest.mark.parametrize(("name", "thing", "signature"), DOCUMENTED)
def test_a_public_docstring_says_arguments_errors_and_who_calls(
    name: str, thing: Any, signature: inspect.Signature
) -> None:
    text = inspect.getdoc(thing) or ""
    assert COLLECTIVE.search(text), f"{name}: collective, local, or called by every rank?"
    assert RAISES.search(text), f"{name}: what does it raise?"
    needed = [name for name in signature.parameters if name not in SELF]
    if "as of the wrapped module" in text.lower():
        needed = []
    missing = [each for each in needed if not re.search(rf"\b{each}\b", text)]
    assert not missing, f"{name}: {', '.join(missing)} not in its docstring"


def members() -> Iterator[tuple[str, Any]]:
    """Public methods and properties of exported classes, records and errors included."""
    for name in gemini.__all__:
        thing = getattr(gemini, name)
        for owner in thing.__mro__ if isinstance(thing, type) else ():
            if owner.__module__.split(".")[0] in ("gemini", "optim", "sharding"):
                for member, value in vars(owner).items():
                    is_ours = isinstance(value, property | functools.cached_property | staticmethod | classmethod)
                    if not member.startswith("_") and (is_ours or inspect.isfunction(value)):
                        yield f"{name}.{member}", getattr(thing, member)


def test_a_public_member_has_a_docstring_and_a_method_says_errors_and_who_calls() -> None:
    found = []
    for name, member in members():
        text = inspect.getdoc(member) or ""
        if not text:
            found.append(f"{name} has no docstring")
        elif not isinstance(member, property | functools.cached_property):
            if not COLLECTIVE.search(text):
                found.append(f"{name}: collective, local, or called by every rank?")
            if not RAISES.search(text):
                found.append(f"{name}: what does it raise?")
    assert not found, "\n".join(found)


def needs_example(thing: Any) -> bool:
    """What is called or subclassed. Errors, enums and plain records are told by their fields."""
    is_class = isinstance(thing, type)
    return not is_class or not (dataclasses.is_dataclass(thing) or issubclass(thing, (Exception, enum.Enum, tuple)))


COMPILED_ONLY = {"launch_from_slurm"}  # runs in a job step of Slurm only
EXAMPLES = [name for name in gemini.__all__ if ">>>" in (getattr(gemini, name).__doc__ or "")]


def test_every_exported_function_and_class_has_an_example() -> None:
    without = [name for name in gemini.__all__ if needs_example(getattr(gemini, name)) and name not in EXAMPLES]
    assert not without, f"write an Example into the docstring of {without}"


def test_which_names_need_an_example() -> None:
    assert all(map(needs_example, (gemini.state_hash, gemini.ShardedModel, gemini.PlacementPolicy)))
    assert not any(map(needs_example, (gemini.BudgetError, gemini.Kind, gemini.HostReading, gemini.ParameterSpec)))


def example_names(text: str) -> dict[str, Any]:
    """What an example finds: a plain `module`, and a sharded `model` of two operators that `optimizer` has stepped."""
    names: dict[str, Any] = {each: getattr(gemini, each) for each in gemini.__all__}
    model = gemini.ShardedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    if "optimizer = " not in text:  # a model has one
        optimizer = gemini.ShardedOptimizer(model, gemini.HybridAdam(model.parameters()))
        optimizer.backward(model(torch.ones(2, 8, device=gemini.current_device())).sum())
        optimizer.step()
        names["optimizer"] = optimizer
    return {**names, "torch": torch, "module": torch.nn.Linear(8, 8), "model": model}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_a_docstring_runs(name: str) -> None:
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    thing, found = getattr(gemini, name), io.StringIO()
    (test,) = finder.find(thing, name, globs=example_names(thing.__doc__ or ""))
    for example in test.examples:
        compile(example.source, name, "single")
    with contextlib.redirect_stdout(found):
        runner.run(test)
    assert not runner.failures, found.getvalue()
    is_skipped = [doctest.SKIP in example.options for example in test.examples]
    assert any(is_skipped) == (name in COMPILED_ONLY) and (runner.tries or name in COMPILED_ONLY)
