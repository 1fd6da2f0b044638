"""Translates the regular expressions of a JSON Schema to the syntax of llguidance's engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchinfer.input.constraints.patterns.engine_syntax import engine_pattern_in_json
from batchinfer.input.constraints.patterns.source import BadPattern
from batchinfer.input.constraints.schema_problem import BadSchema


def translate_patterns(schemas: Iterable[dict[str, Any]]) -> None:
    """Translate `pattern` and `patternProperties` of schemas from ECMAScript to Rust's crate regex, in place.

    Args:
        schemas: A parsed schema and its subschemas. Subschemas of an element are not visited.

    Raises:
        BadSchema: A pattern is invalid or unsupported.
    """
    for schema in schemas:
        if isinstance(pattern := schema.get("pattern"), str):
            schema["pattern"], _ = _translate("pattern", pattern)
        if isinstance(named := schema.get("patternProperties"), dict):
            schema["patternProperties"] = _translate_names(schema, named)


def _translate_names(schema: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, one in named.items():
        pattern, narrowed = _translate("patternProperties", name)
        if pattern in found:
            raise BadSchema("patternProperties has two patterns that say the same; write one")
        if narrowed and _outside_matter(schema):
            raise BadSchema(
                "patternProperties has a class of characters that holds U+0000, and quotes or backslashes not, beside "
                r"other properties; add \x00 to the class, as in [^\x00\"], or write additionalProperties: false"
            )
        found[pattern] = one
    return found


def _outside_matter(schema: dict[str, Any]) -> bool:
    # Excluding U+0000 from a pattern matters if such a name is still allowed, by name or as an additional property
    named = [*_names(schema.get("properties")), *_names(schema.get("required"))]
    return schema.get("additionalProperties") is not False or any("\0" in name for name in named)


def _names(found: Any) -> list[str]:
    return [one for one in found if isinstance(one, str)] if isinstance(found, dict | list) else []


def _translate(keyword: str, pattern: str) -> tuple[str, bool]:
    try:
        return engine_pattern_in_json(pattern)
    except BadPattern as error:
        raise BadSchema(f"{keyword}: {error}") from None
