"""A job's last index leaves what it knew of its rows, so that the next run prepares only rows that changed."""
