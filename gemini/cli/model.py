"""The model that a command is about, and options that commands share."""

from __future__ import annotations

import importlib
import json
import operator
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn
from torch.nn.parameter import is_lazy

from gemini.cli.families import known
from gemini.cli.hub import NotOnHub, config_of, is_hub_id
from gemini.settings import SHORT_DTYPES

# -- Dtypes as they are written on the command line.


def dtype_option(name: str) -> torch.dtype | None:
    """The dtype that `--dtype` names; None for "own". Raises typer.BadParameter."""
    if name not in (*SHORT_DTYPES, "own"):
        raise typer.BadParameter(f"must be one of own, {', '.join(SHORT_DTYPES)}, found {name!r}", param_hint="--dtype")
    return SHORT_DTYPES.get(name)


# -- Settings by the names that they have on the command line, in texts that the library writes for Python.


# The order matters: the first text ends with the second one.
_OPTIONS = (
    ("model_data_memory= or device_memory=", "--device-memory"),  # model data has no option: it gets what is left
    ("device_memory=", "--device-memory"),
    ("host_memory=", "--host-memory"),
    ("disk_memory=", "--disk-memory"),
    ("disk_path=", "--disk-path"),
    ("chunk_size=", "--chunk-size"),
)
_POLICY = re.compile(r"\btensor_placement_policy='(\w+)(?:\([^']*\))?'")  # "static" names its fractions


def with_options(text: str) -> str:
    """`text` with each setting under the name of its option."""
    for setting, option in _OPTIONS:
        text = text.replace(setting, option)
    return _POLICY.sub(r"--policy \1", text)


# -- From what a user names on the command line to a model of which only shapes exist.


class NotAModel(ValueError):
    """What was named is no model. The message says what was found and what can be named."""


def check_name(name: str) -> None:
    """Check what can be said of a name at once, before anything is imported or measured. Local.

    Raises NotAModel where no model is there, or has such a name.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        _config_file(path)
    elif ":" not in name and not is_hub_id(name):
        raise NotAModel(
            f"{name!r} is no folder with a config.json, no .json file and no id of the Hugging Face Hub (owner/model); "
            "a model of your own is named as package.module:attribute"
        )


def model_named(name: str) -> Any:
    """A Hugging Face config, or a module on the meta device. Local; imports the module that is named, which runs it.

    name: a folder with a config.json, a .json file of Hugging Face's, an id of its Hub ("owner/model"), of which the
    config alone is read, or "package.module:attribute", where the attribute is a module, a class of one, or a function
    that makes one without arguments.

    Raises NotAModel.
    """
    check_name(name)
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _hugging_face(_config_file(path))
    if is_hub_id(name):
        try:
            return _hugging_face(config_of(name))
        except NotOnHub as error:
            raise NotAModel(str(error)) from None
    module_name, _, attribute = name.partition(":")
    # As with `python -m`, modules in the folder where the command was started are found.
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        # A module object has its memory by now. A class or a function is called on "meta", where weights take none.
        found = _imported(name, module_name, attribute)
        if not isinstance(found, nn.Module) and callable(found):
            with torch.device("meta"):
                found = _made(name, found)
    finally:
        sys.path.remove(here)  # the user's module may have put others before it
    if not isinstance(found, nn.Module):
        raise NotAModel(f"{name!r} is {type(found).__name__}, neither a module nor something that makes one")
    lazy = [its_name for its_name, parameter in found.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise NotAModel(f"{name!r} has no shape for {lazy[0]!r} before its first forward: give its layers all sizes")
    return found


def _imported(name: str, module_name: str, attribute: str) -> Any:
    if not module_name or not attribute:
        raise NotAModel(f"{name!r} names no attribute of a module: write package.module:attribute")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise NotAModel(f"{name!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        # A script that parses arguments on import may call `sys.exit`, which would end the command without a word.
        raise NotAModel(f"{name!r} cannot be imported: {_raised(error)}") from error


def _made(name: str, factory: Callable[[], Any]) -> Any:
    """What a class or function makes of tensors without values."""
    try:
        return factory()
    except TypeError as error:
        raise NotAModel(f"{name!r} is called without arguments: {error}; name a function that has none") from error
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise NotAModel(
            f"{name!r} cannot be made of tensors without values: {_raised(error)}. Name a function that only builds "
            "the model, and reads no weights"
        ) from error


def _raised(error: BaseException) -> str:
    """What the user's code raised, and the last line of it that ran."""
    frames = traceback.extract_tb(error.__traceback__)
    # Frames of installed packages, of importlib and of this file say nothing to the user. The last of the others is
    # a line of the user's own.
    own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
    own = [frame for frame in own if not frame.filename.startswith("<") and "importlib" not in frame.filename]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _config_file(path: Path) -> Path:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = "is no file" if file.exists() else "does not exist"
        raise NotAModel(f"{file} {what}: Hugging Face's models keep their config there")
    return file


def _hugging_face(file: Path) -> Any:
    found = known(_contents(file) or {})
    if found is not None:
        return found
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, __version__
    except ImportError as error:
        raise NotAModel(f"{file} needs the package transformers: pip install transformers") from error
    try:
        # A path is named here, so nothing must be looked up on the Hub.
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        # Either the file is broken, or this release of transformers does not know its model yet: the remedies differ.
        kind = (_contents(file) or {}).get("model_type")
        if kind is None or kind in CONFIG_MAPPING:
            raise NotAModel(f"{file} is no config of a Hugging Face model: {error}") from error
        raise NotAModel(
            f"{file} is no config of a Hugging Face model that is known here: transformers {__version__} has no "
            f"model_type {kind!r}. Name its module as package.module:attribute instead"
        ) from None


def _contents(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
