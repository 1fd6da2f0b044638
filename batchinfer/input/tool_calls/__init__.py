"""Calls of tools in answers: how checkpoints write them, how they are read, and grammars that ask for them."""
