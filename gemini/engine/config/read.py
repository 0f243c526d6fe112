"""From a file to the mapping that it holds: JSON, YAML, TOML, or Python that is run."""

from __future__ import annotations

import os
import re
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from gemini.engine.config.json_text import TextError, parse_json
from gemini.engine.config.line import line_of, lines_of
from gemini.engine.config.problem import Problem
from gemini.errors import ConfigError
from gemini.placement.sizes import format_bytes

# A larger file is not a config but a wrong path, such as that of a checkpoint.
MAX_BYTES = 2**20
NO_EXEC = "GEMINI_NO_EXEC"
_TOO_DEEP = "brackets are nested too deeply for a config"


@dataclass(frozen=True)
class Source:
    """A config as it was given."""

    data: dict[str, Any]
    name: str = "config"  # for errors: the file's path
    text: str = ""
    suffix: str = ""  # the format. "": it was given as a mapping
    constants: dict[str, Any] = field(default_factory=dict)  # names in capitals of a Python file

    def error(self, problems: list[Problem]) -> ConfigError:
        """One line for each problem, with its place in the file."""
        lines = lines_of(self.text, self.suffix)
        found = [(line_of(each.path, lines), each) for each in problems]
        words = (f"{self.name}, line {line}: {each}" if line else f"{self.name}: {each}" for line, each in found)
        return ConfigError("\n".join(words))


def read(source: Mapping[str, Any] | str | os.PathLike[str]) -> Source:
    """A config that is a mapping already, or the file at a path. Runs a Python file. Raises ConfigError."""
    if isinstance(source, Mapping):
        _refuse_cycles(source, "config")
        return Source(dict(source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config is a mapping or the path of a file, found {type(source).__name__}")
    path = Path(source)
    text = _text_of(path)
    try:
        found = _READERS[path.suffix](text, path)
    except TextError as error:
        # The message has what a parser found, so its traceback is noise; what the user's own code raised is not.
        cause = error.__cause__ if path.suffix == ".py" else None
        raise ConfigError(f"{path}{f', line {error.line}' if error.line else ''}: {error}") from cause
    except RecursionError as error:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from error
    # Python refuses to convert a number of more than 4,300 digits, and the readers do not catch that.
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    _refuse_cycles(found, path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values, found {type(found).__name__}")
    # Colossal-AI's scripts read BATCH_SIZE and the like from the config themselves. These are no keys of any library.
    constants = {name: found.pop(name) for name in list(found) if path.suffix == ".py" and name.isupper()}
    return Source(found, str(path), text, path.suffix, constants)


def _refuse_cycles(value: Any, name: str | Path, above: tuple[int, ...] = ()) -> None:
    """YAML's anchors and Python can put a mapping into itself, in which a walk over its keys would never end."""
    if not isinstance(value, (Mapping, list, tuple)):
        return
    # Only what stands around this value counts: a YAML anchor that is used twice is no cycle.
    if id(value) in above:
        raise ConfigError(f"{name}: a mapping or list is a part of itself: write out what it holds")
    try:
        for inner in value.values() if isinstance(value, Mapping) else value:
            _refuse_cycles(inner, name, (*above, id(value)))
    except RecursionError as error:
        raise ConfigError(f"{name}: {_TOO_DEEP}") from error


def _text_of(path: Path) -> str:
    """What a file says, once it is known to be a config's size and kind."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give the path of a config file in it")
    if not path.exists():
        raise ConfigError(f"{path} does not exist (looked for in {Path.cwd()}): give the path of a config, or a dict")
    if path.suffix not in _READERS:
        raise ConfigError(f"{path}: the end of the name says the format, one of {', '.join(_READERS)}")
    # Reading a pipe or a device might never end.
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file")
    num_bytes = path.stat().st_size
    if num_bytes > MAX_BYTES:
        found, limit = format_bytes(num_bytes), format_bytes(MAX_BYTES)
        raise ConfigError(f"{path} has {found}; a config has at most {limit}: is this the right file?")
    try:
        # "utf-8-sig" drops the mark that some editors put before the text: an error in JSON and TOML.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty: a config that only has defaults is {{}}")
    return text


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.1 with two changes: 1e-3 is a number, as in YAML 1.2, and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # PyYAML would take the last of two equal keys, without a word.
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise TextError(f"the key {key.value!r} stands there twice: leave one out", key.start_mark.line + 1)
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


# YAML 1.1 has no float without a dot, so PyYAML reads 1e-3 as a string. The rule is added to a copy of PyYAML's rules
# that belongs to this class alone.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_json(text: str, path: Path) -> Any:
    return parse_json(text)


def _read_yaml(text: str, path: Path) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise TextError(f"not valid YAML: {error.problem}", line) from error
    except yaml.YAMLError as error:
        raise TextError(f"not valid YAML: {error}") from error


def _read_toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib has the line only in its message.
        line = re.search(r"at line (\d+)", str(error))
        raise TextError(f"not valid TOML: {error}", int(line[1]) if line else None) from error


def _read_python(text: str, path: Path) -> Any:
    """The variables that a file sets. Its code runs in this process, with all rights of the user's."""
    if os.environ.get(NO_EXEC) == "1":
        raise TextError(f"a Python config is code, which {NO_EXEC}=1 forbids to run: write it as JSON, YAML or TOML")
    # `__name__` is not "__main__", so that a file which is also a script does not start its training here.
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(text, str(path), "exec"), names)
    except SyntaxError as error:
        raise TextError(f"not valid Python: {error.msg}", error.lineno) from error
    # SystemExit is no Exception: a config that calls `sys.exit()` would end this rank alone, and the others would wait.
    except (Exception, SystemExit) as error:
        # The error may have been raised inside a function of a library. The user is told the config's own line.
        here = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise TextError(f"the config raised {words}", here[-1] if here else None) from error
    return {name: value for name, value in names.items() if not name.startswith("_") and _is_value(value)}


def _is_value(value: Any) -> bool:
    """Imported modules, classes and functions are how a config is made, and no part of it."""
    return not isinstance(value, (ModuleType, type)) and not (callable(value) and hasattr(value, "__code__"))


_READERS: dict[str, Callable[[str, Path], Any]] = {
    ".json": _read_json,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": _read_toml,
    ".py": _read_python,
}
