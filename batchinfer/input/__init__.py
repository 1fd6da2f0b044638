"""Reads input files and queries in chunks, and turns each row into a prompt with a work key.

formats/      a reader per file format
tokenizer/    encodes texts to token ids and decodes token ids to texts
tool_calls/   the syntaxes of tool calls, and the grammars that constrain an answer to them
constraints/  the schemas, patterns and grammars that an answer must match
prompts/      templates, sampling parameters and work keys; rows are rendered in worker processes
"""
