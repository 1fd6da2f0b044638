"""References within a JSON Schema: `$ref` with a JSON Pointer (RFC 6901) or an anchor of the same document."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


class UnknownReference(ValueError):
    """A `$ref` that names nothing in its document; the message says which."""


def resolved(root: Any, reference: Any) -> Any:
    """What `reference` names in the document `root`. Nothing outside it is read. Raises UnknownReference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise UnknownReference(f"its $ref {str(reference)[:100]!r} names another document")
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        return _anchored(root, pointer)
    found = root
    for part in pointer.split("/")[1:]:
        found = _step(found, part.replace("~1", "/").replace("~0", "~"), reference)
    return found


def _step(schema: Any, part: str, reference: str) -> Any:
    if isinstance(schema, dict) and part in schema:
        return schema[part]
    if isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
        return schema[int(part)]
    raise UnknownReference(f"its $ref {reference[:100]!r} names nothing in the schema")


def _anchored(root: Any, name: str) -> Any:
    pending = [root]
    while pending:
        schema = pending.pop()
        if isinstance(schema, dict):
            if schema.get("$anchor") == name:
                return schema
            pending.extend(schema.values())
        elif isinstance(schema, list):
            pending.extend(schema)
    raise UnknownReference(f"its $ref {'#' + name[:100]!r} names nothing in the schema")
