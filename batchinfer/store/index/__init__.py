"""A job's index: which row is which piece of work. Ingest writes it, the planner and the results read it."""
