"""Sampling parameters as requests of other programs write them."""
