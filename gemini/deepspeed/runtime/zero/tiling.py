"""`deepspeed.runtime.zero.tiling`: linear layers in tiles."""

from __future__ import annotations

from typing import Any

from gemini.elsewhere import missing
from gemini.model.tiled import TiledLinear

__all__ = ["TiledLinear"]


def __getattr__(name: str) -> Any:
    """Raises AttributeError, which says what to use in place of a name of DeepSpeed's."""
    raise missing(__name__, name)
