"""Shows where two ranks' descriptions of one thing differ, for an error."""

from __future__ import annotations

from itertools import takewhile, zip_longest

_BEFORE, _BEHIND = 120, 80  # characters around the first difference


def first_difference(one: str, other: str) -> str:
    """The first line that differs, of both texts, from some characters before its first difference on."""
    lines = zip_longest(one.split("\n"), other.split("\n"), fillvalue="nothing more")
    mine, its = next(((a, b) for a, b in lines if a != b), ("", ""))
    at = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(mine, its, strict=False))))
    start = max(0, at - _BEFORE)
    shown = ("..." * (start > 0) + line[start : at + _BEHIND] for line in (mine, its))
    return " against ".join(shown)
