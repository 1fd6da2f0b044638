"""Runs a job: from the job file to the published result."""
