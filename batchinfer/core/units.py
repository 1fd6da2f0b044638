"""Numbers as people read them: 12.3k, 41%, 4 min 5 s. A number that is not known is a dash.

Bytes are in batchinfer.core.sizes, which other rooms need too.
"""

from __future__ import annotations

UNKNOWN = "–"


def count(value: float | None) -> str:
    """An exact count with thousands separators: 2,388."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def counted(number: float | None, noun: str) -> str:
    """A count with what is counted, whose plural ends in s: 1 error row, 2,388 error rows."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def short(value: float | None) -> str:
    """Three digits and a suffix: 950, 12.3k, 1.20M."""
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
    """A share of one: 41%, and one decimal below ten percent: 0.5%."""
    if share is None:
        return UNKNOWN
    return f"{share:.0%}" if share == 0 or abs(share) >= 0.0995 else f"{share:.1%}"


def seconds(value: float | None) -> str:
    """An interval as measured: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 5 min."""
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{_three(value * 1000)} ms"
    return f"{_three(value)} s" if value < 59.95 else _long(round(value))


def about(value: float | None) -> str:
    """An interval to be waited for: whole seconds, minutes or hours."""
    if value is None:
        return UNKNOWN
    if value < 59.5:
        return f"{max(1, round(value))} s"
    return f"{round(value / 60)} min" if value < 3570 else _long(round(value))


def _long(value: int) -> str:
    if value < 3600:
        return f"{value // 60} min {value % 60} s"
    return f"{value // 3600} h {value % 3600 // 60} min"
