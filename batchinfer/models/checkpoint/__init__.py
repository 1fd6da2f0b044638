"""A checkpoint: its configuration, and its weights as they are stored."""
