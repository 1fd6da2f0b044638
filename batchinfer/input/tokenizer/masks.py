"""Masks stand in a prompt's text for what looks like a special token and is to be encoded as plain text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any


def masks_for(value: Any, pattern: re.Pattern[str]) -> dict[str, str]:
    """Masks of all special-token texts in a value, which no text in it can hold: they are named after its digest."""
    digest = hashlib.sha256(repr(value).encode("utf-8", "replace")).hexdigest()[:24]
    found = sorted({match for text in texts_of(value) for match in pattern.findall(text)})
    return {f"\ue0f4{digest}.{number}\ue0f5": literal for number, literal in enumerate(found)}


def texts_of(value: Any) -> list[str]:
    """All texts in a value, the names of its objects included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for one in pair for text in texts_of(one)]
    return [text for item in value for text in texts_of(item)] if isinstance(value, list) else []


def masked(value: Any, masks: Mapping[str, str], substitute: Callable[..., str]) -> Any:
    """The same value with each special-token text replaced by its mask; `masks` are by that text."""
    if isinstance(value, str):
        return substitute(lambda match: masks[match.group(0)], value)
    if isinstance(value, Mapping):
        return {
            masked(name, masks, substitute): masked(one, masks, substitute) for name, one in value.items()
        }
    return [masked(item, masks, substitute) for item in value] if isinstance(value, list) else value
