"""Typed columns: what a schema makes of an answer's text."""
