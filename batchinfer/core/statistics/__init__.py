"""Statistics: non-negative least squares and survival curves."""
