"""`deepspeed.runtime`: the modules of it that scripts import from."""
