"""Operators refuse invalid operands, and do not access memory outside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def assert_refused(words: str, call: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Check that a call raises ValueError with these words, a regular expression; "": with any."""
    with pytest.raises(ValueError, match=words or None):
        call(*arguments, **options)
