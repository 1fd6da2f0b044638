"""Reads and writes files: locations of user data, durable writes, the state folder, digests, DuckDB with limits."""
