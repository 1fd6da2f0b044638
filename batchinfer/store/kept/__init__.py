"""The kept index: prepared rows of the last run. The next run reuses unchanged segments, files and chunks."""
