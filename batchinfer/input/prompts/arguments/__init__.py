"""Arguments of chat templates: which ones a template reads, and what the job and its rows tell it."""
