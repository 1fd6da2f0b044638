"""The index of a job: all rows with their work keys. Ingest writes it; the planner and the results read it."""
