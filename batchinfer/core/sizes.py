"""Bytes as people read them. Every room may use it, those included that must not import the report."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_MOST_DIGITS = 9


def size(value: float) -> str:
    """Three digits in the unit that fits: 512 bytes, 1.50 KiB, 310 MiB, 1.25 GiB."""
    return _written(value, 3)


def sizes(one: float, other: float) -> tuple[str, str]:
    """Both, with as many digits as tell them apart: nobody learns much from 1.00 GiB where 1.00 GiB are too little."""
    for digits in range(3, _MOST_DIGITS):
        texts = _written(one, digits), _written(other, digits)
        if texts[0] != texts[1] or one == other:
            return texts
    return _exact(one), _exact(other)


def _exact(value: float) -> str:
    """An integer beyond 2^53 would lose its last digits on the way through a float."""
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
    """A whole number is written as one; else so many digits, those before the point always."""
    if value == int(value):
        return f"{value:,.0f}"
    before = len(str(round(abs(value))))
    return f"{value:,.{max(0, digits - before)}f}"
