"""Sections of the page about the answers: what they are, which rows have none, and how many are right."""
