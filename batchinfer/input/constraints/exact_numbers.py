"""Converts numbers of a JSON Schema to numbers that llguidance 1.9 follows exactly, or rejects them.

llguidance reads numbers as 64-bit floats, and misses the nearest float for one in nine numbers with 16 or 17 digits.
It stores the integer part of bounds in 64 bits. If both bounds have the same integer part, it may allow an excluded
bound. Otherwise it may still write 0.99999999999999999999, which becomes 1 when it is read as a float.
Bounds therefore get at most 15 digits and are always inclusive. tests/batchinfer/test_random_schemas.py compares the
result with exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeGuard

from batchinfer.input.constraints.schema_problem import BadSchema

Number = int | float | Decimal

LARGEST = 2**63 - 1024  # the largest float below 2**63
_MANTISSA, _EXPONENT = 2**53, 22  # a decimal within these limits becomes a float by one exact operation
_DIGITS = 15
_LEAST = Decimal("1e-15")  # distance from an excluded zero to the inclusive bound
_FINEST = -_EXPONENT
_MOST_MULTIPLE = 2**32 - 1
_WIDE = Context(prec=100)  # numbers have up to 19 digits before the point and 22 after it


def is_number(value: Any) -> TypeGuard[Number]:
    """Return True if a value of parsed JSON is a number."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def is_exact(value: Number) -> bool:
    """Return True if llguidance both reads and writes this number of a JSON Schema without rounding."""
    if not _decimal(value).is_finite() or _decimal(value).copy_abs() >= 2**63:
        return False
    if value == int(value):
        return int(float(int(value))) == value
    _, digits, exponent = _decimal(value).as_tuple()
    written = "".join(map(str, digits)).lstrip("0")
    mantissa = written.rstrip("0")
    decimals = -int(exponent) - (len(written) - len(mantissa))
    return len(mantissa) <= _DIGITS + 1 and int(mantissa) <= _MANTISSA and decimals <= _EXPONENT


def plain(value: Number) -> int | float:
    """Convert an exact number (see `is_exact`) to int if it is whole, else to float."""
    return int(value) if value == int(value) else float(value)


def nearest_inside(
    bound: Number, up: bool, *, excluded: bool = False, other: Number | None = None
) -> int | float:
    """Return the nearest number inside a bound of a JSON Schema that llguidance reads and writes without rounding.

    The result is an inclusive bound, which replaces the bound of the schema.

    Args:
        bound: The bound of the schema.
        up: True for a lower bound, False for an upper bound.
        excluded: True if the bound is exclusive.
        other: The opposite bound of the schema, or None. If `bound` is 0, the result stays much closer to 0 than this.

    Raises:
        BadSchema: There is no such number.
    """
    value, sign = _decimal(bound), 1 if up else -1
    reach = value if up else value.copy_negate()
    if not value.is_finite() or reach > LARGEST:
        raise BadSchema(
            f"a bound leaves only numbers beyond {sign * LARGEST}; they cannot be followed exactly"
        )
    if reach < -LARGEST:
        return -sign * LARGEST
    if not excluded and is_exact(bound):
        return plain(bound)
    if value == value.to_integral_value() and value.copy_abs() >= _MANTISSA:
        return _whole_inward(int(value) + sign * excluded, up)
    step = _step(value, other)
    moved = value.quantize(step, ROUND_CEILING if up else ROUND_FLOOR, _WIDE)
    return plain(moved + sign * step if excluded and moved == value else moved)


def whole_inward(bound: Number, up: bool, excluded: bool) -> int:
    """Return the nearest integer inside a bound of a JSON Schema that llguidance reads and writes without rounding.

    The result is an inclusive bound for integers, which replaces the bound of the schema.

    Args:
        bound: The bound of the schema.
        up: True for a lower bound, False for an upper bound.
        excluded: True if the bound is exclusive.

    Raises:
        BadSchema: There is no such integer.
    """
    if not _decimal(bound).is_finite() or _decimal(bound).copy_abs() > LARGEST:
        return int(nearest_inside(bound, up))
    whole = math.ceil(bound) if up else math.floor(bound)
    if excluded and whole == bound:
        whole += 1 if up else -1
    return _whole_inward(whole, up)


def check_multiple(value: Number) -> None:
    """Raise BadSchema if a value of the keyword `multipleOf` is not positive, or llguidance would round it."""
    if value <= 0:
        raise BadSchema("multipleOf must be more than 0")
    if not is_exact(value) or _read_multiple(float(value)) != _decimal(value):
        raise BadSchema(
            "multipleOf has more digits than can be followed exactly; give one of fewer digits, such as 0.01 or 5"
        )


def check_multiples(values: Iterable[Number]) -> None:
    """Raise BadSchema if llguidance cannot check one number against all these values of `multipleOf`.

    It computes their least common multiple with 32 bits.
    """
    exact = [_decimal(value) for value in {*values}]
    scale = max((0, *(-int(one.as_tuple().exponent) for one in exact)))
    whole = [int(one.scaleb(scale)) for one in exact]
    if len(whole) > 1 and math.lcm(*whole) * max(whole) > _MOST_MULTIPLE:
        raise BadSchema(
            "the least common multiple of its multipleOf is too large to be followed exactly; name one"
        )


def _whole_inward(whole: int, up: bool) -> int:
    found = float(whole)
    if (int(found) < whole) if up else (int(found) > whole):
        found = math.nextafter(found, math.inf if up else -math.inf)
    return int(found)


def _step(value: Decimal, other: Number | None) -> Decimal:
    # At 0 the step must stay small against the range between the bounds
    if value:
        return Decimal(1).scaleb(max(value.adjusted() + 1 - _DIGITS, _FINEST))
    near = Decimal(1).scaleb(max(_decimal(other).adjusted() - 3, _FINEST)) if other else _LEAST
    return min(_LEAST, near)


def _read_multiple(value: float) -> Decimal | None:
    # llguidance multiplies the float by ten until it is whole
    exponent = 0
    while value != int(value) and value <= _MOST_MULTIPLE:
        value, exponent = value * 10, exponent + 1
    return Decimal(int(value)).scaleb(-exponent) if value <= _MOST_MULTIPLE else None


def _decimal(value: Number) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
