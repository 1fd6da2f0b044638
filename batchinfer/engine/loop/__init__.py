"""The engine loop: schedule, run and post-process steps."""
