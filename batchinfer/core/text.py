"""Makes untrusted text safe to show: no character can control a terminal or break a line of JSON."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

# C0 except tab and newline, DEL, C1; marks that reorder text (bidirectional overrides and isolates); lone surrogates,
# which cannot be encoded
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Make a text safe to show in a terminal: control characters and invalid bytes become escapes.

    Tabs and newlines are kept.
    """
    return _UNSAFE.sub(lambda found: _escaped(found.group()), text)


# A path follows the start of the text, a space, a quotation mark, punctuation, or a terminal style sequence
_BEFORE_PATH = r"""(?:(?<![^\s"'`=:,;(\[])|(?<=\x1b\[\dm))"""
_OVERRIDE = re.compile(r"--set '?[\w.]+=$")  # paths in overrides are relative to the folder of the job file


def on_one_line(text: str) -> str:
    """Make a text safe to show in one line of a terminal: control characters, newlines and tabs become escapes."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def with_near_paths(text: str) -> str:
    """Replace the absolute paths of a message that are below the current folder by relative paths."""
    try:
        here = os.getcwd()
    except OSError:  # the folder was deleted
        return text
    if here == "/" or here not in text:
        return text
    path = re.compile(rf"{_BEFORE_PATH}{re.escape(here)}/(?=[^\s/\"'])")
    return path.sub(lambda found: found.group() if _OVERRIDE.search(text[: found.start()]) else "", text)


def without_markup(text: str) -> str:
    """Return a Markdown text with each link replaced by its text, and without backticks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, in Python's surrogateescape form
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def json_line(value: Mapping[str, Any]) -> str:
    """Return a mapping as one line of JSON that is safe to show in a terminal, with times in ISO 8601.

    Raises:
        TypeError: A value has no JSON form.
        ValueError: A number is not finite.
    """
    text = json.dumps(dict(value), default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, ignoring case, or None if no name is similar."""
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), folded, 1)
    return folded[near[0]] if near else None
