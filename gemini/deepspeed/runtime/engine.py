"""`deepspeed.runtime.engine`: the class of the engine, for scripts that name it."""

from typing import Any

from gemini.deepspeed.engine import DeepSpeedEngine
from gemini.elsewhere import missing

__all__ = ["DeepSpeedEngine"]


def __getattr__(name: str) -> Any:
    """Raises AttributeError, which says what to use in place of a name of DeepSpeed's."""
    raise missing(__name__, name)
