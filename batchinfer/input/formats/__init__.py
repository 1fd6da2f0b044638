"""The readers of the input formats."""
