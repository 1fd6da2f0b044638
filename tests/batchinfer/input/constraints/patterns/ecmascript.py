"""A real ECMAScript engine, used as an oracle for regular expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import quickjs

_FUNCTION = """
(function (pattern, texts) {
  let expression;
  try { expression = new RegExp(JSON.parse(pattern), "u"); } catch (error) { return "null"; }
  return JSON.stringify(JSON.parse(texts).map((text) => expression.test(text)));
})
"""
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


@cache
def _test() -> Any:
    return quickjs.Context().eval(_FUNCTION)


def matches(pattern: str, texts: Sequence[str]) -> list[bool] | None:
    """Return for each text whether the pattern (flag u) matches part of it, or None if the pattern is invalid."""
    found = _test()(json.dumps(_strict(pattern)), json.dumps(texts))
    return None if found == "null" else [bool(one) for one in json.loads(found)]


def _strict(pattern: str) -> str:
    """Replace escaped punctuation, which flag u refuses, by hex escapes. The meaning is the same."""
    return _ESCAPE.sub(
        lambda found: (
            found[0]
            if found[1] in _SYNTAX or found[1].isalnum() or not (" " <= found[1] <= "~")
            else f"\\x{ord(found[1]):02x}"
        ),
        pattern,
    )
