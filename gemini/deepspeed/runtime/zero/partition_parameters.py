"""`deepspeed.runtime.zero.partition_parameters`: what scripts ask a parameter of, that DeepSpeed has divided."""

from __future__ import annotations

from typing import Any

from gemini.access.released import ZeroParamStatus
from gemini.deepspeed.runtime.zero import GatheredParameters, Init, register_external_parameter
from gemini.elsewhere import missing

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]


def __getattr__(name: str) -> Any:
    """Raises AttributeError, which says what to use in place of a name of DeepSpeed's."""
    raise missing(__name__, name)
