"""Turns rows into prompts with sampling parameters and work keys, in worker processes."""
