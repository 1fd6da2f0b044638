"""In which order a job's requests run: duplicates, the prefix forest, policies."""
