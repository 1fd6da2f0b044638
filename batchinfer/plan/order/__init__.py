"""The order in which a job's requests run: duplicates, the prefix forest, long answers first."""
