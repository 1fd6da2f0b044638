"""The loop: schedule, run, post-process."""
