"""`deepspeed.runtime.zero.partition_parameters`: what scripts ask a parameter of, that DeepSpeed has divided."""

from __future__ import annotations

from gemini.access.released import ZeroParamStatus
from gemini.deepspeed.runtime.zero import GatheredParameters, Init, register_external_parameter
from gemini.elsewhere import refusing

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]

__getattr__ = refusing(__name__)
