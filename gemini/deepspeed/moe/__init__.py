"""`deepspeed.moe`: what scripts import of it, also those that train no experts."""

from gemini.elsewhere import refusing

__getattr__ = refusing(__name__)
