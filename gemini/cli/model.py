"""From what a user names on the command line to a model of which only shapes exist."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


class NotAModel(ValueError):
    """What was named is no model. The message says what was found and what can be named."""


def model_named(name: str) -> Any:
    """A Hugging Face config, or a module on the meta device. Local; imports the module that is named, which runs it.

    name: a folder with a config.json, a .json file of Hugging Face's, or "package.module:attribute", where the
    attribute is a module, a class of one, or a function that makes one without arguments.

    Raises NotAModel.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _hugging_face(path)
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise NotAModel(
            f"{name!r} is no folder with a config.json and no .json file; a model of your own is named as "
            "package.module:attribute"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise NotAModel(f"{name!r} cannot be imported: {error}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(found, nn.Module) and callable(found):
        try:
            with torch.device("meta"):
                found = found()
        except TypeError as error:
            raise NotAModel(f"{name!r} is called without arguments: {error}; name a function that has none") from error
    if not isinstance(found, nn.Module):
        raise NotAModel(f"{name!r} is {type(found).__name__}, neither a module nor something that makes one")
    return found


def _hugging_face(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise NotAModel(f"{file} does not exist: Hugging Face's models keep their config there")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise NotAModel(f"{file} needs the package transformers: pip install transformers") from error
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise NotAModel(f"{file} is no config of a Hugging Face model: {error}") from error
