"""gemini's sister packages have short names; a user's own `optim.py` or `sharding/` beside a script would win."""

import importlib.util
from pathlib import Path


def check() -> None:
    """Raises ImportError naming the file that is found instead of our `optim` or `sharding`."""
    for name in ("optim", "sharding"):
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is None or not (Path(origin).parent / "py.typed").is_file() or Path(origin).name != "__init__.py":
            raise ImportError(
                f"gemini needs its own package {name!r}, but Python finds {origin or 'nothing'}: rename that file or "
                "folder, or remove its folder from sys.path"
            )
