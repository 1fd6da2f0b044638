"""The tables of a run: what is measured, and the columns that follow."""
