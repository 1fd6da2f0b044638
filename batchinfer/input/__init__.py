"""The definition of a row: input files and queries are read in chunks, and each row becomes a prompt with a work key.

formats/      one reader for each file format
tokenizer/    texts to token ids, and back
tool_calls/   the styles in which models write tool calls, and the grammars that ask for them
constraints/  schemas, patterns and grammars that answers follow
prompts/      templates, sampling parameters and work keys; rows are rendered in worker processes
"""
