"""A config's text: what it says, line by line, and what is wrong with it."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import tomllib
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gemini.errors import ConfigError
from gemini.placement.demand import format_bytes

# -- The valid name that a user most likely meant: by meaning first, by spelling where the words say nothing.
#
# Names of options are a few words of one field, and communities disagree about the words: `gradient_clipping`,
# `max_grad_norm` and `clip_grad_norm` are one thing, and no two of them are spelled alike. Words of one meaning stand
# in one line of `_SYNONYMS`; the nearest name has the most meanings in common.


_SYNONYMS = (
    "clip clipping max_grad_norm grad_norm max_norm gradient_clip_val",
    "grad grads gradient gradients",
    "accumulation accumulate accum acc accumulated",
    "lr learning_rate",
    "memory mem ram vram bytes budget",
    "device gpu cuda accelerator",
    "host cpu",
    "placement offload offloading place residency tensor_placement_policy cpu_offload offload_optimizer offload_param",
    "dtype precision half amp type dtypes fp16 bf16 bfloat16 float16",
    "stage zero zero_stage level",
    "shard sharding shards partition partitioning",
    "strategy plan",
    "micro per_device per_gpu mini minibatch",
    "batch batches bs",
    "scheduler schedule lr_scheduler lr_schedule",
    "optimizer optim optimiser",
    "timeout seconds",
    "reduce communication comm allreduce reduction",
    "initial init start",
    "interval window every frequency",
    "growth grow increase",
    "backoff decrease",
    "print log logging report verbose",
    "train training",
    "steps step iters iterations",
    "chunk bucket block",
    "size numel elements",
    "max maximum largest limit",
    "min minimum least smallest",
    "scale scaling scaler",
    "monitors monitor tensorboard logger metrics tracker",
    "arguments params kwargs args parameters",
    "wd weight_decay",
    "beta betas momentum",
)
_MEANING = {word: line.split()[0] for line in _SYNONYMS for word in line.split()}
# The longest phrases come first: `max_grad_norm` contains `grad_norm`.
_PHRASES = sorted((word for word in _MEANING if "_" in word), key=len, reverse=True)
_TYPO, _ALIKE = 0.85, 0.6  # ratios of difflib: a slip of the finger; and what may still be meant
_MEANT = 0.3  # the part of all meanings that two names have in common


def meanings(name: str) -> frozenset[str]:
    """What the words of a name mean.

    >>> sorted(meanings("gradient_clipping"))
    ['clip', 'grad']
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|[-. ]", "_", name).lower()
    found = set()
    for phrase in _PHRASES:
        # Phrases are found as whole words: `max_norm` is no part of `max_normalized`.
        if re.search(rf"(?<![a-z0-9]){phrase}(?![a-z0-9])", name):
            found.add(_MEANING[phrase])
            # A phrase also has the meanings of its words: `max_grad_norm` is near to names with "grad", too.
            found.update(_MEANING[word] for word in phrase.split("_") if word in _MEANING)
            # What a longer phrase has used is no phrase of its own any more.
            name = name.replace(phrase, "_")
    return frozenset(found | {_MEANING.get(word, word) for word in name.split("_") if word})


def is_slip(name: str, of: str) -> bool:
    """Whether `name` is `of` with a slip of the finger, or in British spelling."""
    return bool(difflib.get_close_matches(name, [of], n=1, cutoff=_TYPO))


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The one of `valid` that is nearest to `name`, or None where none is near.

    Valid names may be dotted paths, of which the last part is compared. Among equals the first in `valid` wins.
    """
    by_last: dict[str, str] = {}
    for path in valid:
        by_last.setdefault(path.rpartition(".")[2], path)
    # A slip of the finger comes first, because its words mean nothing: "stge" is in no line of synonyms.
    slip = difflib.get_close_matches(name, by_last, n=1, cutoff=_TYPO)
    if slip:
        return by_last[slip[0]]
    wanted = meanings(name)

    def in_common(last: str) -> tuple[float, float]:
        theirs = meanings(last)
        # The first number is the part of all their meanings that both names have. Spelling decides among equals.
        return len(wanted & theirs) / len(wanted | theirs), difflib.SequenceMatcher(None, name, last).ratio()

    best = max(by_last, key=in_common, default=None)
    if best is not None and in_common(best)[0] >= _MEANT:
        return by_last[best]
    alike = difflib.get_close_matches(name, by_last, n=1, cutoff=_ALIKE)
    return by_last[alike[0]] if alike else None


# -- What is wrong with a config, in words: one sentence for each key.


KeyPath = tuple[str, ...]

_MAX_NAMES = 30

# The keys are types of pydantic's errors. Names in braces stand for entries of an error's context.
_MUST_BE = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}


@dataclass(frozen=True)
class Problem:
    """What is wrong with a key.

    Args:
        path: the key. Empty: the config as a whole.
        words: what follows the key in the sentence: "must be ...", "=5 is ...", or ": " and a sentence of its own.
    """

    path: KeyPath
    words: str

    def __str__(self) -> str:
        key = ".".join(self.path)
        return f"{key}{'' if not key or self.words[0] in ':=' else ' '}{self.words}"


def said_of(path: KeyPath, sentence: str) -> Problem:
    """A sentence about a key or its section; where it begins with a key's name, what it says of that."""
    begins = re.match(rf"{re.escape(path[-1])}(?=[ =])\s*", sentence) if path else None
    return Problem(path, sentence[begins.end() :] if begins else f": {sentence}" if path else sentence)


def unknown_key(path: KeyPath, valid: Iterable[str]) -> Problem:
    """The problem of an unknown key. valid: all keys, as dotted paths; those beside the unknown one are tried first."""
    # A row for all names below a section is no name that could be proposed.
    valid, parent = [key for key in valid if not key.endswith("*")], ".".join(path[:-1])
    beside = [key for key in valid if key.rpartition(".")[0] == parent]
    # A key in its own section is meant more often than one of the same words elsewhere.
    found = nearest(path[-1], beside) or nearest(path[-1], valid)
    if found is not None:
        return Problem(path, f"is not a key; the nearest valid one is {found!r}")
    names = sorted({key.rpartition(".")[2] for key in beside or valid})
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return Problem(path, f"is not a key; valid ones are {', '.join(names[:_MAX_NAMES])}{more}")


def problems_of(error: ValidationError, valid: Iterable[str], prefix: KeyPath = ()) -> list[Problem]:
    """What pydantic found, with the nearest of the `valid` keys for those that are unknown."""
    return [_problem(each, prefix, list(valid)) for each in error.errors(include_url=False)]


def _problem(error: ErrorDetails, prefix: KeyPath, valid: list[str]) -> Problem:
    path = (*prefix, *(str(part) for part in error["loc"]))
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(path, valid)
    if kind == "missing":
        return Problem(path, "is missing")
    # The config's own validators raise ValueError, with a sentence for the user.
    if kind == "value_error":
        return said_of(path, str(context["error"]))
    found = f"found {shown(error['input'])}"
    if error["input"] == "auto":
        return Problem(path, 'is "auto", which nothing decides here: write the value, or leave the key out')
    if kind in _MUST_BE:
        return Problem(path, f"must be {_MUST_BE[kind].format_map(context)}, {found}")
    # Errors of kinds that `_MUST_BE` does not have are told in pydantic's words, with key and value.
    return Problem(path, f": {error['msg']}, {found}")


def shown(value: Any) -> str:
    """A value of a config in a sentence, not longer than a line."""
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- JSON as people write it for DeepSpeed, whose reader takes more than JSON: comments, last commas, Python's True.
#
# Everything else is an error that names the line and what to do there.


# Every pattern below also matches strings, so that the inside of a string is never taken for anything else.
_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENTS_AND_NAMES = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/|\b(?:True|False|None)\b", re.S)
_TOKENS = re.compile(rf"(?P<key>{_STRING})\s*:|{_STRING}|[{{}}\[\]]")
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_NAMES = {"True": "true", "False": "false", "None": "null"}


class TextError(ValueError):
    """What is wrong with a text, and in which line (from 1)."""

    def __init__(self, words: str, line: int | None = None) -> None:
        super().__init__(words)
        self.line = line


def parse_json(text: str) -> Any:
    """The value that a JSON text says. Raises TextError."""
    strict = strict_json(text)
    try:
        found = json.loads(strict, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise TextError(*_in_words(strict, error)) from error
    # This comes after `json.loads`: the search for tokens takes it for granted that brackets and strings are closed.
    _refuse_repeats(strict)
    return found


def strict_json(text: str) -> str:
    """The text without what JSON does not have; every character that stays keeps its place."""
    # Comments go first: one may stand between the last comma and its bracket.
    return _LAST_COMMA.sub(_blank, _COMMENTS_AND_NAMES.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    # Blanks keep every line where the user wrote it, so that errors name that line.
    found = match[0]
    return found if found[0] == '"' else _NAMES.get(found) or re.sub(r"[^\n]", " ", found)


def _refuse_repeats(text: str) -> None:
    """Refuse equal keys in valid JSON: json.loads would take the last of them, and its hooks know no lines."""
    objects: list[dict[str, int]] = []  # the line of every key, of the objects and lists that are open
    for token in _TOKENS.finditer(text):
        if token[0] in "{[":
            # Lists are counted, too, so that each closing bracket ends the right one. They have no keys.
            objects.append({})
        elif token[0] in "}]":
            objects.pop()
        elif token["key"] is not None:
            # Keys are compared as JSON reads them: "l\u0072" is "lr".
            name, line = json.loads(token["key"]), text.count("\n", 0, token.start()) + 1
            if name in objects[-1]:
                first = objects[-1][name]
                raise TextError(f"the key {name!r} stands there twice, first in line {first}: leave one out", line)
            objects[-1][name] = line


def _refuse_constant(name: str) -> NoReturn:
    raise TextError(f"{name} is not a number that a config can hold")


def _in_words(text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    rest = text[error.pos :]
    # The parser notices a missing comma at the next token, which often stands a line below the place to mend.
    before = text[: error.pos].rstrip()
    line = before.count("\n") + 1
    if rest.startswith("..."):
        return "'...' stands for the rest of an example: put your own keys there, or remove it", error.lineno
    if error.msg.startswith("Expecting ',' delimiter") and rest:
        last = before.rsplit("\n", 1)[-1].strip()
        return f"a comma is missing at the end of this line, after {last!r}", line
    if not rest.strip():
        return "the text ends before the last bracket is closed", line
    if rest[0] == "'":
        return "JSON has strings in double quotes only", error.lineno
    return f"{error.msg}, found {rest.split(maxsplit=1)[0][:40]!r}", error.lineno


# -- In which line of a file a key stands, for error messages.


def lines_of(text: str, suffix: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key of a text that was read as a config. Empty for other texts."""
    try:
        return _FORMATS[suffix][1](text) if suffix else {}
    # A line is a help only. The error itself is told in any case, and must not give way to one of this search.
    except (yaml.YAMLError, RecursionError):
        return {}


def line_of(path: KeyPath, lines: dict[KeyPath, int]) -> int | None:
    """The line of the innermost key of `path` that has one."""
    # A key that is missing has no line, so the line is that of the section in which it is missing.
    known = [lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines]
    return known[0] if known else None


def _of_json(text: str) -> dict[KeyPath, int]:
    # YAML contains JSON, except that it has no tabs between tokens. `strict_json` keeps every line where it was.
    return _of_yaml(strict_json(text).replace("\t", " "))


def _of_yaml(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}

    def walk(node: yaml.Node | None, path: KeyPath) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            inner = (*path, str(key.value))
            lines[inner] = key.start_mark.line + 1
            walk(value, inner)

    # `compose` stops before values are made: nodes know their lines, and values do not.
    walk(yaml.compose(text, yaml.SafeLoader), ())
    return lines


def _of_toml(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        # tomllib has no positions, and the text is valid TOML here, so a search for headers and names of keys is
        # enough.
        header, entry = re.match(r"\s*\[+([^\]]+)\]", line), re.match(r"""\s*([\w."' -]+?)\s*=""", line)
        if header:
            table = _parts(header[1])
            lines.setdefault(table, number)
        elif entry:
            lines.setdefault((*table, *_parts(entry[1])), number)
    return lines


def _parts(name: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in name.split("."))


def _of_python(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}

    def walk(node: ast.expr, path: KeyPath) -> None:
        inside: list[tuple[str, ast.expr]] = []
        # Colossal-AI's files write sections as calls, `zero = dict(model_config=dict(...))`, or as dict literals.
        if isinstance(node, ast.Call):
            inside = [(each.arg, each.value) for each in node.keywords if each.arg]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            inside = [(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]
        for name, value in inside:
            lines[(*path, name)] = value.lineno
            walk(value, (*path, name))

    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                lines[(ast.unparse(target),)] = statement.lineno
                walk(statement.value, (ast.unparse(target),))
    return lines


# -- From a file to the mapping that it holds: JSON, YAML, TOML, or Python that is run.


# A larger file is not a config but a wrong path, such as that of a checkpoint.
MAX_BYTES = 2**20
NO_EXEC = "GEMINI_NO_EXEC"
_TOO_DEEP = "brackets are nested too deeply for a config"


@dataclass(frozen=True)
class ConfigText:
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


def read(source: Mapping[str, Any] | str | os.PathLike[str]) -> ConfigText:
    """A config that is a mapping already, or the file at a path. Runs a Python file. Raises ConfigError."""
    if isinstance(source, Mapping):
        _refuse_cycles(source, "config")
        return ConfigText(dict(source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config is a mapping or the path of a file, found {type(source).__name__}")
    path = Path(source)
    text = _text_of(path)
    try:
        found = _FORMATS[path.suffix][0](text, path)
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
    return ConfigText(found, str(path), text, path.suffix, constants)


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
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: the end of the name says the format, one of {', '.join(_FORMATS)}")
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


# By the end of a file's name: what reads a text, and what finds the lines of its keys.
_FORMATS: dict[str, tuple[Callable[[str, Path], Any], Callable[[str], dict[KeyPath, int]]]] = {
    ".json": (lambda text, path: parse_json(text), _of_json),
    ".yaml": (_read_yaml, _of_yaml),
    ".yml": (_read_yaml, _of_yaml),
    ".toml": (_read_toml, _of_toml),
    ".py": (_read_python, _of_python),
}
