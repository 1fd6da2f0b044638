"""The exception for a JSON Schema that cannot be used."""

from __future__ import annotations


class BadSchema(ValueError):
    """A schema that cannot be used. The message gives the reason, and quotes only keywords of the schema."""
