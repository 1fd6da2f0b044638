"""A model's folder: which files it has, and what may be read of them."""
