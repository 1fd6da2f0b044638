"""Sections of the page about the answers: their values, the failed rows, and the accuracy."""
