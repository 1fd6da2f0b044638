"""Text that others wrote, made fit to be shown: no character of it can steer a terminal or break a line of JSON."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

# C0 but tab and newline, DEL, C1; marks that reorder text (bidirectional overrides and isolates); lone surrogates,
# which no encoding can write.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with its control characters, and bytes of paths that are not UTF-8, written out: \\x1b, \\u202e. Tabs and
    newlines stay."""
    return _UNSAFE.sub(lambda found: _escaped(found.group()), text)


# Before a path: the beginning, a space, a quotation mark or punctuation, or a terminal's change of style
_BEFORE_PATH = r"""(?:(?<![^\s"'`=:,;(\[])|(?<=\x1b\[\dm))"""
_OVERRIDE = re.compile(r"--set '?[\w.]+=$")  # whose paths are relative to the folder of the job file


def with_near_paths(text: str) -> str:
    """`text` in which paths below the current folder are relative, as users type them."""
    try:
        here = os.getcwd()
    except OSError:  # the folder was deleted: no path is below it
        return text
    if here == "/" or here not in text:
        return text
    path = re.compile(rf"{_BEFORE_PATH}{re.escape(here)}/(?=[^\s/\"'])")
    return path.sub(lambda found: found.group() if _OVERRIDE.search(text[: found.start()]) else "", text)


def without_markup(text: str) -> str:
    """Return Markdown with each link replaced by its text, and without backticks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is not UTF-8, as Python keeps it
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def json_line(value: Mapping[str, Any]) -> str:
    """One line of JSON; times in ISO 8601, unknown values null. Raises TypeError, ValueError for what JSON lacks."""
    text = json.dumps(dict(value), default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None if no name is similar. Case does not count."""
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), folded, 1)
    return folded[near[0]] if near else None
