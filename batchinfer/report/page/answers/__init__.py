"""Sections of the page about answers: their values, failed rows and accuracy."""
