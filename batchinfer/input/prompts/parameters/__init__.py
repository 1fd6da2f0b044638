"""Sampling parameters from the fields of API requests."""
