"""Numbers of a JSON Schema in the form that llguidance 1.9 reads exactly, or a refusal.

It reads them as 64-bit floats, and misses the nearest float for one number of 16 or 17 digits in nine. It holds whole
parts of bounds in 64 bits. An excluded bound may get through where both bounds share their whole part, and even where
it does not, 0.99999999999999999999 is below 1 until somebody reads it as a float. So bounds have at most 15 digits and
are never excluded ones; tests/batchinfer/test_random_schemas.py compares with exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeGuard

from batchinfer.input.constraints.schema_problem import BadSchema

Number = int | float | Decimal

LARGEST = 2**63 - 1024  # the largest float of 63 bits
_MANTISSA, _EXPONENT = 2**53, 22  # up to these a decimal number becomes a float by one exact operation
_DIGITS = 15
_LEAST = Decimal("1e-15")  # what comes next to an excluded zero
_FINEST = -_EXPONENT
_MOST_MULTIPLE = 2**32 - 1
_WIDE = Context(prec=100)  # of 19 digits before the point and 22 behind it


def is_number(value: Any) -> TypeGuard[Number]:
    """Whether a value of parsed JSON is a number."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def is_exact(value: Number) -> bool:
    """Whether llguidance reads and writes just this number."""
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
    """An exact number as what json writes so that it is read exactly: a whole one without a point."""
    return int(value) if value == int(value) else float(value)


def inward(bound: Number, up: bool, *, excluded: bool = False, other: Number | None = None) -> int | float:
    """The nearest exact number that is not below `bound` (`up`) or not above it, and not itself where it is excluded.

    `other`: the bound on the other side. Raises BadSchema where there is none.
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
    """The nearest exact whole number on the inner side of a bound of integers. Raises BadSchema."""
    if not _decimal(bound).is_finite() or _decimal(bound).copy_abs() > LARGEST:
        return int(inward(bound, up))
    whole = math.ceil(bound) if up else math.floor(bound)
    if excluded and whole == bound:
        whole += 1 if up else -1
    return _whole_inward(whole, up)


def check_multiple(value: Number) -> None:
    """Raises BadSchema for a multipleOf that llguidance does not read as it is written."""
    if value <= 0:
        raise BadSchema("multipleOf must be more than 0")
    if not is_exact(value) or _read_multiple(float(value)) != _decimal(value):
        raise BadSchema(
            "multipleOf has more digits than can be followed exactly; give one of fewer digits, such as 0.01 or 5"
        )


def check_multiples(values: Iterable[Number]) -> None:
    """Raises BadSchema where the least common multiple of these takes llguidance more than the 32 bits it has."""
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
    """The distance between neighbours of 15 digits; a thousandth of a range from zero that is smaller still."""
    if value:
        return Decimal(1).scaleb(max(value.adjusted() + 1 - _DIGITS, _FINEST))
    near = Decimal(1).scaleb(max(_decimal(other).adjusted() - 3, _FINEST)) if other else _LEAST
    return min(_LEAST, near)


def _read_multiple(value: float) -> Decimal | None:
    """Read a multipleOf as llguidance does: it is multiplied by ten until it is whole."""
    exponent = 0
    while value != int(value) and value <= _MOST_MULTIPLE:
        value, exponent = value * 10, exponent + 1
    return Decimal(int(value)).scaleb(-exponent) if value <= _MOST_MULTIPLE else None


def _decimal(value: Number) -> Decimal:
    """The number as it is written."""
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
