"""The processes of an engine with several ranks. Rank 0 is the worker itself, and starts the others."""
