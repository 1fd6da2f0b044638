"""Results: the join of index and completions, result files, publishing and verification."""
