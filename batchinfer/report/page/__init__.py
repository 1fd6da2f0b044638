"""The HTML page about a run: charts of its report tables, each with the table of its numbers."""
