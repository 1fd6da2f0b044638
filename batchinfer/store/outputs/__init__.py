"""The kinds of answers: one file each, and their registry."""
