"""Byte sizes in text: "2GB" is 2 * 10**9, "2GiB" is 2 * 2**30, and a bare "2G" is refused as ambiguous."""

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | float | str | None, name: str) -> int | None:
    """Bytes of `value`; None stays None. `name` is the argument named in errors.

    Raises TypeError for what is neither a number nor a string, ValueError for no size, a negative or an infinite one.
    """
    if value is None:
        return None
    # For Python a bool is an int, so True would be one byte.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name} must be bytes (int) or a string such as '8GiB', found {type(value).__name__}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            valid = "B, KB, MB, GB, TB (powers of 10) or KiB, MiB, GiB, TiB (powers of 2)"
            raise ValueError(f"{name}={value!r} is not a size: write a number and one of {valid}")
        value = float(match[1]) * _UNITS[match[2].upper()]
    # Only NaN is unequal to itself.
    if value < 0 or value != value or value == float("inf"):
        raise ValueError(f"{name} must be a finite number of bytes >= 0, found {value}")
    return int(value)


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for display: exact below 10 KiB, else four significant digits and a binary unit."""
    if abs(num_bytes) < 10 * 2**10:
        return f"{num_bytes} B"
    # At this point the number is at least 10 KiB, so one of the units fits.
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(num_bytes) >= 2**power:
            return f"{num_bytes / 2**power:.4g} {unit}"
    raise AssertionError("unreachable")
