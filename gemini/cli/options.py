"""Settings by the names that they have on the command line, in texts that the library writes for Python."""

from __future__ import annotations

import re

# The order matters: the first text ends with the second one.
_OPTIONS = (
    ("model_data_memory= or device_memory=", "--device-memory"),  # model data has no option: it gets what is left
    ("device_memory=", "--device-memory"),
    ("host_memory=", "--host-memory"),
    ("chunk_size=", "--chunk-size"),
)
_POLICY = re.compile(r"\btensor_placement_policy='(\w+)(?:\([^']*\))?'")  # "static" names its fractions


def with_options(text: str) -> str:
    """`text` with each setting under the name of its option."""
    for setting, option in _OPTIONS:
        text = text.replace(setting, option)
    return _POLICY.sub(r"--policy \1", text)
