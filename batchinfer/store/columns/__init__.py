"""Typed columns: converts answers to columns of a result with the help of a JSON Schema."""
