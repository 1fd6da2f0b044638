"""Formats of texts, held to what exists and what a column holds: days of the calendar, lengths of addresses.

llguidance knows 29 days in every February and a year 0, seconds of 60, and no length of a host's or mailbox's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.input.constraints.exact_numbers import is_number

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DAY = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
# A second of 60 and a seventh decimal are none of Python's times, nor of a column's
_SECONDS = r"[0-5][0-9](\.[0-9]{1,6})?([Zz]|[+-].*)$"
# An offset moves the first and the last of years beyond the calendar
_INNER_YEAR = "(?:000[2-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-8][0-9]{3}|9[0-8][0-9]{2}|99[0-8][0-9]|999[0-8])"
_LABEL = r"[^.@\[]{1,63}"
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (f"^{_DAY}$",),
    "time": (f"^.{{6}}{_SECONDS}",),
    "date-time": (f"^{_DAY}[Tt].{{6}}{_SECONDS}", f"[Zz]$|^{_INNER_YEAR}"),
    "email": (rf"^[^@]{{1,64}}@(?:\[.*|{_LABEL}(?:\.{_LABEL})*)$",),
}
# 2026-11-22T14:31:03.123456+00:00; RFC 1123 and RFC 5321 for names
_LONGEST = {"date-time": 32, "time": 21, "hostname": 253, "email": 254}


def narrow_format(schema: dict[str, Any]) -> None:
    """Narrow the format of one schema in place."""
    form = schema.get("format")
    if not isinstance(form, str) or not isinstance(schema.get("allOf", []), list):
        return
    if form in _PATTERNS:
        further = [{"pattern": pattern} for pattern in _PATTERNS[form]]
        schema["allOf"] = [*schema.get("allOf", []), *further]
    if form in _LONGEST:
        _shorten(schema, _LONGEST[form])


def _shorten(schema: dict[str, Any], most: int) -> None:
    least, longest = schema.get("minLength", 0), schema.get("maxLength", most)
    if is_number(least) and least <= most and is_number(longest):
        schema["maxLength"] = min(most, longest)
