"""gemini's sister packages have short names, and a user's own `optim.py` or `sharding/` beside a script would win.

Importing this module checks that Python finds ours. Otherwise it raises ImportError, which names the file that is in
the way: without the check the first missing attribute would be reported, somewhere deep in gemini.
"""

import importlib.util
from pathlib import Path

for _name in ("optim", "sharding"):
    # `find_spec` runs no code of what it finds.
    _spec = importlib.util.find_spec(_name)
    _origin = _spec.origin if _spec is not None else None
    # A user's package of this name has an `__init__.py`, too, but hardly a `py.typed` beside it.
    if _origin is None or not (Path(_origin).parent / "py.typed").is_file() or Path(_origin).name != "__init__.py":
        raise ImportError(
            f"gemini needs its own package {_name!r}, but Python finds {_origin or 'nothing'}: rename that file or "
            "folder, or remove its folder from sys.path"
        )
