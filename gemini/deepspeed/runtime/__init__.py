"""`deepspeed.runtime`: the modules of it that scripts import from."""

from gemini.elsewhere import refusing

__getattr__ = refusing(__name__)
