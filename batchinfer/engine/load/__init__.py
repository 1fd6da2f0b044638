"""Loads an engine: its model, operators and memory."""
