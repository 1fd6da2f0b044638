"""The tables of the report: their columns, and the code that measures and writes them."""
