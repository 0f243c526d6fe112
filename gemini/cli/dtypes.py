"""Dtypes as they are written on the command line."""

from __future__ import annotations

import torch
import typer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_option(name: str) -> torch.dtype | None:
    """The dtype that `--dtype` names; None for "own". Raises typer.BadParameter."""
    if name not in (*DTYPES, "own"):
        raise typer.BadParameter(f"must be one of own, {', '.join(DTYPES)}, found {name!r}", param_hint="--dtype")
    return DTYPES.get(name)
