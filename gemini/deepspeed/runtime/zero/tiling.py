"""`deepspeed.runtime.zero.tiling`: linear layers in tiles."""

from __future__ import annotations

from gemini.elsewhere import refusing
from gemini.model.tiled import TiledLinear

__all__ = ["TiledLinear"]

__getattr__ = refusing(__name__)
