"""Rows become prompts: templates, the tokenizer, sampling parameters and work keys, in worker processes."""
