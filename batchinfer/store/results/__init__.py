"""Stored completions, and what is published from them: join, result files, cleaning, verification."""
