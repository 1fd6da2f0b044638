"""Numbers and times of a JSON Schema, held to what llguidance 1.9 follows exactly.

It reads numbers as 64-bit floats, lets an exclusive bound itself through where both bounds share their whole part, and
may name an unnamed property twice. tests/batchinfer/test_schema_shapes.py has the cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

DIGITS = 18  # of an integer without bounds: a column holds 64 bits
_MOST = 10**DIGITS - 1
_LOWS, _HIGHS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# A second of 60 and a seventh decimal are none of Python's times, nor of a column's
_SECONDS = r"[0-5][0-9](\.[0-9]{1,6})?([Zz]|[+-].*)$"
_PATTERNS: Mapping[str, str] = {"time": f"^.{{6}}{_SECONDS}", "date-time": f"^.{{17}}{_SECONDS}"}
_LONGEST = {"date-time": 32, "time": 21}  # 2026-11-22T14:31:03.123456+00:00


class BadSchema(ValueError):
    """A schema that cannot be used; the message says why and quotes nothing of it but keywords."""


def narrow_value(schema: dict[str, Any]) -> None:
    """Narrow one schema in place, not those within it. Raises BadSchema for what cannot be followed exactly."""
    _check_listed(schema)
    _check_least(schema)
    _bound(schema)
    _include_bounds(schema)
    if isinstance(form := schema.get("format"), str) and form in _PATTERNS:
        schema.setdefault("pattern", _PATTERNS[form])
        _shorten(schema, _LONGEST[form])


def _shorten(schema: dict[str, Any], most: int) -> None:
    least, longest = schema.get("minLength", 0), schema.get("maxLength", most)
    if _is_number(least) and least <= most and _is_number(longest):
        schema["maxLength"] = min(most, longest)


def _check_listed(schema: dict[str, Any]) -> None:
    for keyword in ("enum", "const", "multipleOf"):
        if keyword in schema and not _exact(schema[keyword]):
            raise BadSchema(
                f"{keyword} has a number with more digits than a 64-bit float; it cannot be followed exactly"
            )


def _exact(value: Any) -> bool:
    """Whether all numbers in it are written as they are after being read as floats."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
        elif _is_number(one) and abs(one) > 2**53:
            try:
                if int(Decimal(repr(float(one)))) != one:
                    return False
            except OverflowError:
                return False
    return True


def _check_least(schema: dict[str, Any]) -> None:
    """Properties that are not named may come twice, and then count once."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if _is_number(least) and isinstance(required, list) and least - len(required) > 1:
        raise BadSchema("minProperties wants more than one property that is not named; name them in required")


def _bound(schema: dict[str, Any]) -> None:
    """Integers have 18 digits at most; bounds of more than 53 bits are moved inwards to what is a float."""
    for names, inwards in ((_LOWS, 1), (_HIGHS, -1)):
        for name in names:
            if _is_number(schema.get(name)):
                schema[name] = _moved(schema[name], inwards)
    said = schema.get("type")
    types = said if isinstance(said, list) else [said]
    if "integer" not in types or "number" in types or {"enum", "const", "$ref"} & schema.keys():
        return
    if not all(_is_number(schema.get(name, 0)) for name in (*_LOWS, *_HIGHS)):
        return  # llguidance says what is wrong with it
    low, high = _bounds(schema)
    if low < _MOST < high:
        schema["maximum"] = _MOST
        schema.pop("exclusiveMaximum", None)
    if high > -_MOST > low:
        schema["minimum"] = -_MOST
        schema.pop("exclusiveMinimum", None)


def _moved(bound: float, inwards: int) -> float:
    if not isinstance(bound, int) or abs(bound) <= 2**53:
        return bound
    try:
        found = float(bound)
    except OverflowError:
        raise BadSchema("a bound is beyond the range of a 64-bit float") from None
    return bound if (found - bound) * inwards >= 0 else int(math.nextafter(found, inwards * math.inf))


def _include_bounds(schema: dict[str, Any]) -> None:
    """An exclusive bound that is whole, with the other bound less than one away, becomes one just beside it."""
    low, high = _bounds(schema)
    if not 0 < high - low < 1:
        return
    step = Decimal(10) ** (Decimal(repr(high - low)).adjusted() - 3)
    for name, kept, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound: Any = schema.get(name)
        if _is_number(bound) and float(bound).is_integer() and bound == (low if sign > 0 else high):
            schema[kept] = float(Decimal(int(bound)) + sign * step)
            del schema[name]


def _bounds(schema: dict[str, Any]) -> tuple[float, float]:
    lows = [schema[name] for name in _LOWS if _is_number(schema.get(name))]
    highs = [schema[name] for name in _HIGHS if _is_number(schema.get(name))]
    return max(lows, default=-math.inf), min(highs, default=math.inf)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
