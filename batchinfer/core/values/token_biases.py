"""Parses `logit_bias`, a mapping from token ids to numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from batchinfer.core.sampling import BIAS, INT32_MAX, MAX_BIASED

RIGHT = "a mapping from token ids to numbers, as in {50256: -100}"
_ID = re.compile(r"[0-9]{1,10}")


def token_biases(value: object) -> tuple[tuple[int, float], ...]:
    """Parse a `logit_bias`, and return its (token id, bias) pairs in the order of the mapping.

    Token ids may be texts, as in JSON. Pairs with a null bias are left out.

    Args:
        value: A mapping from token ids to numbers, or a list of pairs (a map of Parquet).

    Raises:
        ValueError: The value is neither, or an id or bias is out of bounds.
    """
    found: dict[int, float] = {}
    for token, bias in _pairs(value):
        number = _token(token)
        if number in found:
            raise ValueError(f"names token {number} twice")
        if bias is not None:
            found[number] = _bias(number, bias)
    if len(found) > MAX_BIASED:
        raise ValueError(f"has {len(found):,} tokens; the limit is {MAX_BIASED:,}")
    return tuple(found.items())


def _pairs(value: object) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple) and all(
        isinstance(one, list | tuple) and len(one) == 2 for one in value
    ):
        return value
    raise ValueError(f"must be {RIGHT}")


def _token(value: object) -> int:
    if isinstance(value, str) and _ID.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= INT32_MAX:
        raise ValueError(f"has {str(value)[:40]!r} for a token id; it must be {RIGHT}")
    return value


def _bias(token: int, value: object) -> float:
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not BIAS.low <= value <= BIAS.high:  # type: ignore[arg-type,operator]
        shown = str(value)[:40] if number else type(value).__name__
        raise ValueError(
            f"the bias of token {token} must be a number from {BIAS.low:g} to {BIAS.high:g}, not {shown}"
        )
    return float(value)  # type: ignore[arg-type]
