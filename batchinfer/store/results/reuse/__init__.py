"""Reuse of earlier answers and result files, and the tokens saved by rows with equal work."""
