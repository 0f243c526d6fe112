"""Amounts as the commands write them: in decimal units for people, and as options that can be pasted."""

from __future__ import annotations

import math

from gemini.placement.demand import parse_bytes

_UNITS = (("GB", 9), ("MB", 6), ("KB", 3))  # sizes of memory are in GB, also those above 1000
_DIGITS = 4


def unit_of(most_bytes: int) -> tuple[str, int]:
    """The one unit of a table, by its largest amount, so that the digits of rows can be compared: ("GB", 9)."""
    return next((each for each in _UNITS if most_bytes >= 10 ** each[1]), _UNITS[-1])


def in_words(num_bytes: int) -> str:
    """Four digits: "42.5 GB"."""
    unit, power = unit_of(num_bytes) if num_bytes >= 10**3 else ("B", 0)
    return f"{num_bytes / 10**power:,.4g} {unit}"


def as_option(num_bytes: int) -> str:
    """At least so many bytes as the value of an option: "76.51GB"."""
    unit, power = unit_of(num_bytes) if num_bytes >= 10**3 else ("B", 0)
    # Rounded up in the fourth digit: what was tried with fewer bytes fits in more.
    step = 10 ** max(0, len(str(num_bytes)) - _DIGITS)
    whole = math.ceil(num_bytes / step) * step
    # An integer that is divided by a power of ten has no digits that a float would add.
    digits, rest = divmod(whole, 10**power)
    return f"{digits}{f'.{rest:0{power}d}'.rstrip('0').rstrip('.') if power else ''}{unit}"


def in_python(num_bytes: int) -> str:
    """Exactly so many bytes, to paste into a script: `"24GB"`, or the number where four digits do not say it."""
    words = as_option(num_bytes)
    return f'"{words}"' if parse_bytes(words, "a size") == num_bytes else str(num_bytes)


def count(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
