"""The plans of a run that come after its first one: of rows that are read meanwhile, and of rows that run again."""
