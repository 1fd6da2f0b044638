"""Rows become prompts with parameters and keys, prepared now or known from the last run."""
