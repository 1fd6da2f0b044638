"""A job's last run keeps prepared rows, so that the next one reuses stretches, files and chunks that did not change."""
