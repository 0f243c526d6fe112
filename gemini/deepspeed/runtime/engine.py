"""`deepspeed.runtime.engine`: the class of the engine, for scripts that name it."""

from gemini.deepspeed.engine import DeepSpeedEngine
from gemini.elsewhere import refusing

__all__ = ["DeepSpeedEngine"]

__getattr__ = refusing(__name__)
