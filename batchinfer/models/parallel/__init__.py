"""A model divided among several ranks."""
