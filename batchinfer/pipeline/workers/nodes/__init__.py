"""Other machines that offer themselves to a run: how they join it, and processes that the run has there."""
