"""The kinds of answers, one module each, and their registry."""
