"""gemini: trains models larger than the GPU they run on, with the same bits wherever the state lives.

    model = ShardedModel(module, device_memory="20GiB")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))

README.md names the files to read first, and docs/architecture.md is the map of all of them.
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gemini.elsewhere import missing_in_gemini

# The sister packages have short names, and a user's own `optim.py` or `sharding/` beside a script would win. Without
# this check the first missing attribute would be reported, somewhere deep in gemini.
for _name in ("optim", "sharding"):
    _spec = find_spec(_name)  # runs no code of what it finds
    _origin = None if _spec is None else _spec.origin
    # A user's package of this name has an `__init__.py`, too, but hardly a `py.typed` beside it.
    if _origin is None or not (Path(_origin).parent / "py.typed").is_file() or Path(_origin).name != "__init__.py":
        raise ImportError(
            f"gemini needs its own package {_name!r}, but Python finds {_origin or 'nothing'}: rename that file or "
            "folder, or remove its folder from sys.path"
        )

__version__ = "0.1.0"  # the only place: pyproject.toml reads it here

# Where each name is, once, in the stub beside this file: a name is imported when it is asked for. `gemini --help` then
# takes no second for torch, and a loop none for the engine.
_STUB = ast.parse(Path(__file__).with_name("__init__.pyi").read_text())
_HOMES = {its.name: each.module for each in _STUB.body if isinstance(each, ast.ImportFrom) for its in each.names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise missing_in_gemini(name)
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
