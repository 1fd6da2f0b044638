"""A job's last run keeps prepared rows, so that the next one reuses segments, files and chunks that did not change."""
