"""Turns of a conversation that are more than text: tool calls."""
