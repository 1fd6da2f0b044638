"""The exception for a JSON Schema that cannot be used."""

from __future__ import annotations


class BadSchema(ValueError):
    """Raised for a JSON Schema that cannot be used. The message gives the reason, and quotes only keywords."""
