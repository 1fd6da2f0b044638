"""Arguments of chat templates: which ones a template reads, and their values from the job and its rows."""
