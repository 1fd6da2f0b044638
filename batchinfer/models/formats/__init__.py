"""The formats in which checkpoints store quantised weights: a file for each, and a registry of them."""
