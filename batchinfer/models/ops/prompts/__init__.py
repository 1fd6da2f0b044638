"""Attention of prompts by optional libraries: adapters for them, and the choice between them and our kernel."""
