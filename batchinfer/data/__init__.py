"""Everything that touches storage, in five rooms: each imports only those before it.

storage/   durable writes, the state folder with its locks, DuckDB within bounds
input/     rows from files and queries: a format is one file behind one protocol, listed in one registry
prompts/   templates, tokenizer and parameters: from rows to prompts with work keys, in worker processes
index/     which row is which piece of work, and the prompts' tokens
results/   the store of completions, its join with the index, and what is published of it
"""
