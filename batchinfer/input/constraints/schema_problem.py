"""The exception for a JSON Schema that cannot be used."""

from __future__ import annotations


class BadSchema(ValueError):
    """Raised for a JSON Schema that is invalid or unsupported.

    The message quotes only keywords of the schema, no texts.
    """
