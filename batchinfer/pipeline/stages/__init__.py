"""The stages of a run, each a module: what it needs are its arguments, what later stages need of it is its result."""
