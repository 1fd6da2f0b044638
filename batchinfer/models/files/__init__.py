"""A model's folder: its files, and which of them may be read."""
