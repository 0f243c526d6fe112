"""The end of `make docs`: the built pages load nothing from another host, so they work without a network."""

import re
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "site"
# What a browser loads by itself. Links that a reader clicks on are no matter.
LOADED = [
    re.compile(r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'> ]+"),
    re.compile(r"<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^\"'> ]+"),
    re.compile(r"url\([\"']?(?:https?:)?//[^)]+\)"),
    re.compile(r"@import\s+[\"'](?:https?:)?//[^\"']+"),
]


def loaded_from_elsewhere(text: str) -> list[str]:
    """The references in a page or style sheet that a browser would fetch from another host."""
    return [found[0] for pattern in LOADED for found in pattern.finditer(text)]


def main() -> int:
    """Exit code 0 if no page or style sheet loads anything from another host."""
    pages = [path for path in SITE.rglob("*") if path.suffix in {".html", ".css"}]
    if not pages:
        print(f"{SITE.name}/ has no pages: run mkdocs first")
        return 1
    found = {path.relative_to(SITE): each for path in pages for each in loaded_from_elsewhere(path.read_text())}
    for path, each in found.items():
        print(f"{path} loads {each}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
