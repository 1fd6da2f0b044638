"""Parses objects and lists in Python's syntax, which some models write instead of JSON."""

from __future__ import annotations

import ast
import json
import re

from batchinfer.input.tool_calls.json_calls import json_value

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    | (?P<string>'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*")
    | (?P<word>True|False|None|true|false|null)\b
    | (?P<other>-?[0-9][0-9.eE+-]* | [\[\]{},:])""",
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
# Python's escapes, backslashes that escape nothing, and characters that must be escaped in JSON
_ESCAPED = re.compile(
    r"""\\(?:[\\'"abfnrtv\n] | x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} | [0-7]{1,3}) | \\ | ["\x00-\x1f]""",
    re.VERBOSE,
)


def python_value(text: str) -> str | None:
    """Translate a dict or list in Python's syntax to JSON text. Return None for any other text."""
    text = text.strip(" \t\n\r")
    if not text.startswith(("{", "[")):
        return None
    tokens: list[str] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return None
        if found["space"] is None:
            if found[0] in "]}" and tokens[-1] == "," and tokens[-2:-1] not in (["{"], ["["]):
                tokens.pop()
            try:
                tokens.append(_json_token(found))
            except SyntaxError:
                return None
        at = found.end()
    return json_value("".join(f"{token} " if token in ",:" else token for token in tokens))


def _json_token(found: re.Match[str]) -> str:
    if found["string"] is not None:
        return f'"{_ESCAPED.sub(_json_escape, found[0][1:-1])}"'
    return _WORDS.get(found[0], found[0])


def _json_escape(found: re.Match[str]) -> str:
    escape = found[0]
    character = ast.literal_eval(f"'{escape}'") if len(escape) > 1 else escape
    return json.dumps(character)[1:-1]
