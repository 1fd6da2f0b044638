"""Values of a job file, and of its rows, that have a notation of their own."""
