"""One file of JSON lines for many cases, each written by a process of its own that may be killed at any time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, dict[str, Any]]:
    """name -> entry, in the order of the file; empty without a file. Lines that are no JSON are passed over."""
    entries: dict[str, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            entries[entry["name"]] = entry
    return entries


def write(path: Path, entry: dict[str, Any]) -> None:
    """Put `entry` in place of the one of its name, in one move: readers never see half a file."""
    entries = read(path) | {entry["name"]: entry}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(each) + "\n" for each in entries.values()))
    os.replace(draft, path)
