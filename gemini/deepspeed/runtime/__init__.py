"""`deepspeed.runtime`: the modules of it that scripts import from."""

from typing import Any

from gemini.elsewhere import missing


def __getattr__(name: str) -> Any:
    """Raises AttributeError, which says what to use in place of a name of DeepSpeed's."""
    raise missing(__name__, name)
