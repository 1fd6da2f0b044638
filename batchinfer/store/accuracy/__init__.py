"""Compares the answers of a result with the expected values in its input."""
