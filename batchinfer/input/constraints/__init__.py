"""Constraints that answers must match: JSON schemas, patterns and grammars."""
