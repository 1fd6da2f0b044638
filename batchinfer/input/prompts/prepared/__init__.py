"""Prepared rows: prompts with parameters and work keys, from this run or an earlier one."""
