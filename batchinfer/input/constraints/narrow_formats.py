"""Restricts formats of texts to dates that exist, and to lengths that addresses and host names may have.

llguidance allows 29 February in every year, the year 0 and the second 60, and names of any length.
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
# Neither Python's times nor time columns have a second 60 or a seventh decimal
_SECONDS = r"[0-5][0-9](\.[0-9]{1,6})?([Zz]|[+-].*)$"
# With a time offset, the first and the last year may lie outside the calendar
_INNER_YEAR = "(?:000[2-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-8][0-9]{3}|9[0-8][0-9]{2}|99[0-8][0-9]|999[0-8])"
_LABEL = r"[^.@\[]{1,63}"
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (f"^{_DAY}$",),
    "time": (f"^.{{6}}{_SECONDS}",),
    "date-time": (f"^{_DAY}[Tt].{{6}}{_SECONDS}", f"[Zz]$|^{_INNER_YEAR}"),
    "email": (rf"^[^@]{{1,64}}@(?:\[.*|{_LABEL}(?:\.{_LABEL})*)$",),
}
# Maximum lengths; 2026-11-22T14:31:03.123456+00:00 has 32; names as in RFC 1123 and RFC 5321
_LONGEST = {"date-time": 32, "time": 21, "hostname": 253, "email": 254}


def narrow_format(schema: dict[str, Any]) -> None:
    """Restrict the keyword `format` of a schema, such as "date", to texts that Python and typed columns can represent.

    The schema is changed, but not its subschemas.
    """
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
