"""Everything that touches storage, in rooms: each imports only those before it.

storage/      durable writes, the state folder with its locks, digests of files, DuckDB within bounds
input/        rows from files and queries; formats/ has a reader for each format, listed in one registry
tokenizer/    texts to token ids and back
constraints/  what answers have to follow: schemas, patterns, grammars
prompts/      rows to prompts with work keys: templates and parameters, in worker processes
index/        which row is which piece of work, and the prompts' tokens
store/        the completion store: answers by work key, their use and cleaning
columns/      typed columns: what a schema makes of an answer's text
results/      the join of index and store, and what is published of it
"""
