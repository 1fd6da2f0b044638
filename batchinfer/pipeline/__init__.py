"""A job from its file to its published result."""
