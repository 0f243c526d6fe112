"""`deepspeed.runtime.zero`: see `offload_config.py`."""
