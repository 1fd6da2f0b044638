"""References within a JSON Schema: `$ref` with a JSON Pointer (RFC 6901) or an anchor of the same document.

Not `referencing` (0.37), which takes 53 ms to import: it would spare some ten statements here, but resolves references
to other documents and to anchors that stand twice, which are refused.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any
from urllib.parse import unquote


class UnknownReference(ValueError):
    """A `$ref` that names nothing in its document; the message says which."""


class References:
    """Resolves the references of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def resolved(self, reference: Any) -> Any:
        """Return the part of the document that `reference` names. Nothing outside it is read. Raises
        UnknownReference."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnknownReference(f"its $ref {str(reference)[:100]!r} names another document")
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            if (named := self._anchors.get(pointer)) is None:
                raise _nothing(reference)
            return named
        found = self._root
        for part in pointer.split("/")[1:]:
            found = _step(found, part.replace("~1", "/").replace("~0", "~"), reference)
        return found

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        """Read once: a schema may have thousands of them. None for a name that stands twice."""
        found: dict[str, Any] = {}
        pending = [self._root]
        while pending:
            schema = pending.pop()
            if isinstance(schema, dict):
                if isinstance(name := schema.get("$anchor"), str):
                    found[name] = None if name in found else schema
                pending.extend(schema.values())
            elif isinstance(schema, list):
                pending.extend(schema)
        return found


def _step(schema: Any, part: str, reference: str) -> Any:
    if isinstance(schema, dict) and part in schema:
        return schema[part]
    if isinstance(schema, list) and part.isdecimal() and len(part) < 10 and int(part) < len(schema):
        return schema[int(part)]
    raise _nothing(reference)


def _nothing(reference: str) -> UnknownReference:
    return UnknownReference(f"its $ref {reference[:100]!r} names nothing in the schema")
