"""What the last index of a job knew of its rows, so that the next run prepares only rows that changed."""
