"""Digests by which rows, and runs of rows, are recognised wherever they stand."""
