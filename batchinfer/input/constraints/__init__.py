"""Constraints that answers follow: schemas, patterns, grammars."""
