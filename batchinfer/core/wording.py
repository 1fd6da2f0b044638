"""Formats numbers with units for people: 12.3k, 41%, 4 min 5 s, 1.25 GiB. None becomes a dash."""

from __future__ import annotations

from datetime import datetime
from typing import Any

UNKNOWN = "–"
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_MOST_DIGITS = 9
_LEAST_SHARE = 0.0005  # the smallest share that is not 0.0% with one decimal
# Units that get a metric prefix, and the unit after the prefix
PREFIXED = {"FLOP/s": "FLOP/s", "bytes/s": "B/s", "J": "J", "J/token": "J/token"}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def count(value: float | None) -> str:
    """Format a count with thousands separators: 2,388. None becomes a dash."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def counted(number: float | None, noun: str) -> str:
    """Format a count with its noun: "1 error row", "2,388 error rows". The plural must end in s."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def short_number(value: float | None) -> str:
    """Format a number with three digits and a suffix: 950, 12.3k, 1.20M. None becomes a dash."""
    if value is None:
        return UNKNOWN
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{_three(value / limit)}{suffix}"
    return _three(value)


def _three(value: float) -> str:
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """Format a share, 0 to 1, as 41%; below ten percent with one decimal, as 0.5%. None becomes a dash."""
    if share is None:
        return UNKNOWN
    return f"{share:.0%}" if share == 0 or abs(share) >= 0.0995 else f"{share:.1%}"


def seconds(value: float | None) -> str:
    """Format a measured duration in seconds: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 5 min. None becomes a dash."""
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{_three(value * 1000)} ms"
    return f"{_three(value)} s" if value < 59.95 else _long(round(value))


def rough_duration(value: float | None) -> str:
    """Format an estimated duration in seconds without decimals: 4 s, 3 min, 2 h 5 min. None becomes a dash."""
    if value is None:
        return UNKNOWN
    if value < 59.5:
        return f"{max(1, round(value))} s"
    return f"{round(value / 60)} min" if value < 3570 else _long(round(value))


def _long(value: int) -> str:
    if value < 3600:
        return f"{value // 60} min {value % 60} s"
    return f"{value // 3600} h {value % 3600 // 60} min"


def size(value: float) -> str:
    """Format a number of bytes with three digits: 512 bytes, 1.50 KiB, 310 MiB, 1.25 GiB."""
    return _written(value, 3)


def sizes(one: float, other: float) -> tuple[str, str]:
    """Format two numbers of bytes with enough digits that the texts differ: "1.001 GiB" and "1.000 GiB"."""
    for digits in range(3, _MOST_DIGITS):
        texts = _written(one, digits), _written(other, digits)
        if texts[0] != texts[1] or one == other:
            return texts
    return _exact(one), _exact(other)


def _exact(value: float) -> str:
    # Formatting an integer above 2^53 as a float would change its last digits
    return f"{value:,} bytes" if isinstance(value, int) else f"{value:,.0f} bytes"


def _written(value: float, digits: int) -> str:
    if abs(value) < 1023.5:
        whole = round(value)
        return f"{whole} byte" if whole == 1 else f"{whole} bytes"
    for unit in _UNITS:
        value /= 1024
        if abs(value) < 1023.5 or unit == _UNITS[-1]:
            break
    return f"{_rounded(value, digits)} {unit}"


def _rounded(value: float, digits: int) -> str:
    if value == int(value):
        return f"{value:,.0f}"
    before = len(str(round(abs(value))))
    return f"{value:,.{max(0, digits - before)}f}"


def is_number(value: Any) -> bool:
    """Return True if a value is an int or float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any, unit: str = "") -> str:
    """Format a value of any type for the report's tables.

    Args:
        value: The value. None becomes a dash.
        unit: The unit of its column, such as "s", "bytes", or "0…1" for shares, which become percentages. Empty: no
            unit.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S} UTC"
    if not is_number(value):
        return str(value)
    return _number(value, unit)


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value) if value >= 0 else f"−{seconds(-value)}"
    if unit == "0…1":
        return _share(value)
    if unit == "bytes":
        return size(value)
    if unit in PREFIXED:
        return prefixed(value, unit)
    if "/" in unit:
        return f"{short_number(value)} {unit}"
    return count(value) if isinstance(value, int) else short_number(value)


def _share(value: float) -> str:
    # A share that is not zero never becomes 0.0%
    if value == 0 or abs(value) >= _LEAST_SHARE:
        return percent(value).replace("-", "−")
    return "< 0.1%" if value > 0 else "> −0.1%"


def prefixed(value: float, unit: str) -> str:
    """Format a number with a metric prefix and a unit: 180 GFLOP/s. PREFIXED lists the supported units."""
    one_unit, letter = next((one for one in _PREFIXES if abs(value) >= one[0] * 0.9995), (1.0, ""))
    return f"{short_number(value / one_unit)} {letter}{PREFIXED[unit]}"
