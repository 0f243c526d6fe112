"""`deepspeed.ops`."""

from gemini.deepspeed.ops import adam as adam
from gemini.elsewhere import refusing

__getattr__ = refusing(__name__)
