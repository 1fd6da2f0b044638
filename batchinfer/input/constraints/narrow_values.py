"""Restricts numbers and formats of a JSON Schema to values that llguidance 1.9 follows exactly.

llguidance reads numbers as 64-bit floats (exact_numbers.py), and may repeat an unnamed property.
tests/batchinfer/schema_shapes.py has the cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from batchinfer.input.constraints.exact_numbers import (
    Number,
    check_multiple,
    is_exact,
    is_number,
    nearest_inside,
    plain,
    whole_inward,
)
from batchinfer.input.constraints.narrow_formats import narrow_format
from batchinfer.input.constraints.schema_problem import BadSchema

DIGITS = 18  # maximum digits of an integer without bounds, since columns have 64 bits
_MOST = whole_inward(10**DIGITS - 1, up=False, excluded=False)
_LOWS, _HIGHS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def narrow_value(schema: dict[str, Any]) -> None:
    """Restrict the numbers and formats of a schema to values that llguidance can follow exactly.

    The schema is changed, but not its subschemas. Raises BadSchema if it cannot be restricted to such values.
    """
    _check_listed(schema)
    _check_least(schema)
    _narrow_bounds(schema)
    narrow_format(schema)


def _check_listed(schema: dict[str, Any]) -> None:
    if is_number(step := schema.get("multipleOf")):
        check_multiple(step)
        schema["multipleOf"] = plain(step)
    for keyword in ("enum", "const"):
        if keyword in schema:
            schema[keyword] = _exact_literal(schema[keyword], keyword)


def _exact_literal(value: Any, keyword: str) -> Any:
    if isinstance(value, dict):
        return {name: _exact_literal(one, keyword) for name, one in value.items()}
    if isinstance(value, list):
        return [_exact_literal(one, keyword) for one in value]
    if not is_number(value):
        return value
    if not is_exact(value):
        raise BadSchema(
            f"{keyword} has a number with more digits than can be followed exactly; up to 15 always can"
        )
    return plain(value)


def _check_least(schema: dict[str, Any]) -> None:
    # llguidance may write an unnamed property twice and count it twice
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if is_number(least) and isinstance(required, list) and least - len(required) > 1:
        raise BadSchema("minProperties wants more than one property that is not named; name them in required")


def _narrow_bounds(schema: dict[str, Any]) -> None:
    if not all(is_number(schema.get(name, 0)) for name in (*_LOWS, *_HIGHS)):
        return  # llguidance reports the error
    low, high = _tightest(schema, _LOWS), _tightest(schema, _HIGHS)
    if _only_integers(schema):
        _bound_integers(schema, low, high)
        return
    if low is not None:
        _set(schema, _LOWS, nearest_inside(low[0], True, excluded=low[1], other=high and high[0]))
    if high is not None:
        _set(schema, _HIGHS, nearest_inside(high[0], False, excluded=high[1], other=low and low[0]))


def _bound_integers(
    schema: dict[str, Any], low: tuple[Number, bool] | None, high: tuple[Number, bool] | None
) -> None:
    least = -math.inf if low is None else whole_inward(low[0], True, low[1])
    most = math.inf if high is None else whole_inward(high[0], False, high[1])
    if low and high and least > most and low[0] <= high[0]:
        raise BadSchema(
            "between its bounds there is no whole number that can be followed exactly: beyond 2^53 only multiples of "
            "2, 4, 8 and so on can; widen them"
        )
    if not {"enum", "const", "$ref"} & schema.keys():
        if least < _MOST < most:
            most = _MOST
        if most > -_MOST > least:
            least = -_MOST
    for names, found in ((_LOWS, least), (_HIGHS, most)):
        if math.isfinite(found):
            _set(schema, names, int(found))


def _set(schema: dict[str, Any], names: tuple[str, str], bound: float) -> None:
    schema.pop(names[1], None)
    schema[names[0]] = bound


def _tightest(schema: dict[str, Any], names: tuple[str, str]) -> tuple[Number, bool] | None:
    sign = 1 if names is _LOWS else -1
    found: Iterator[tuple[Number, bool]] = ((schema[n], n == names[1]) for n in names if n in schema)
    return max(found, key=lambda one: (one[0] * sign, one[1]), default=None)


def _only_integers(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    types = kind if isinstance(kind, list) else [kind]
    return "integer" in types and "number" not in types
