"""Durable writes, the state folder with its locks, DuckDB within bounds: what the other rooms read and write with."""
