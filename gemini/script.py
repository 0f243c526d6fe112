"""Warnings that name the user's line, however many of our functions lie between."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

# torch wraps what it calls of ours: the `step` of an optimizer, and what it decorates with `no_grad`. contextlib stands
# around functions that are decorated with a context manager. The separator keeps a folder beside ours, such as
# `gemini_scripts`, from passing for a part of it.
_NOT_SCRIPTS = *(f"{Path(module).parent}{os.sep}" for module in (__file__, torch.__file__)), contextlib.__file__


def warn_at_script(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside gemini and torch. A fixed `stacklevel` is right for one way here only."""
    # From Python 3.12 on `warnings.warn(skip_file_prefixes=...)` does the same.
    frame, level = sys._getframe(), 1
    while frame.f_code.co_filename.startswith(_NOT_SCRIPTS) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
