"""Replaces special-token literals in the texts of a row by masks, which are encoded as plain text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any


def masks_for(value: Any, pattern: re.Pattern[str]) -> dict[str, str]:
    """Choose a placeholder (mask) for each text in a row's value that looks like a special token.

    While a template is rendered, the placeholder replaces the text, so that the tokenizer does not take the text for a
    special token.

    Args:
        value: A JSON value of the row.
        pattern: Matches the special tokens of the checkpoint.

    Returns:
        The replaced text by placeholder.
    """
    digest = hashlib.sha256(repr(value).encode("utf-8", "replace")).hexdigest()[:24]
    found = sorted({match for text in texts_of(value) for match in pattern.findall(text)})
    return {f"\ue0f4{digest}.{number}\ue0f5": literal for number, literal in enumerate(found)}


def texts_of(value: Any) -> list[str]:
    """Return all texts in a JSON value, including the keys of objects."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for one in pair for text in texts_of(one)]
    return [text for item in value for text in texts_of(item)] if isinstance(value, list) else []


def mask_texts(value: Any, masks: Mapping[str, str], substitute: Callable[..., str]) -> Any:
    """Return a copy of a JSON value in which texts that look like special tokens are replaced by placeholders.

    Args:
        value: The value.
        masks: The placeholder for each such text.
        substitute: The method `sub` of the pattern that finds these texts.
    """
    if isinstance(value, str):
        return substitute(lambda match: masks[match.group(0)], value)
    if isinstance(value, Mapping):
        return {
            mask_texts(name, masks, substitute): mask_texts(one, masks, substitute)
            for name, one in value.items()
        }
    return [mask_texts(item, masks, substitute) for item in value] if isinstance(value, list) else value
