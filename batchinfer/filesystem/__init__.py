"""Where bytes are: locations of user data, durable writes, the state folder, digests of files, DuckDB with limits."""
