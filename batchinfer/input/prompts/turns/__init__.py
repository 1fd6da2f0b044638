"""Turns of a conversation that are more than text: the calls of tools."""
