"""Resolves `$ref` in a JSON Schema: JSON Pointers (RFC 6901) and anchors within the same document.

The package `referencing` (0.37) is not used. It takes 53 ms to import, would save about ten statements, and accepts
references that are rejected here: to other documents, and to ambiguous anchors.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any
from urllib.parse import unquote


class UnknownReference(ValueError):
    """Raised for a `$ref` that names no part of its document. The message quotes the `$ref`."""


class References:
    """Resolves the references (`$ref`) within one JSON Schema document."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def resolve(self, reference: Any) -> Any:
        """Return the part of the document that a `$ref` names. Other documents are never read.

        Raises:
            UnknownReference: The document has no such part.
        """
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
