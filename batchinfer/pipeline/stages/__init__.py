"""The stages of a run, one per module. A stage takes its inputs as arguments and returns what later stages need."""
