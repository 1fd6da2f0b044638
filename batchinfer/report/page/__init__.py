"""The page about one run: its report tables as charts, each with the table of its numbers, in one HTML file."""
