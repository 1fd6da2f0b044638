"""The exception for a JSON Schema that cannot be used."""

from __future__ import annotations


class BadSchema(ValueError):
    """A schema that cannot be used; the message says why and quotes nothing of it but keywords."""
