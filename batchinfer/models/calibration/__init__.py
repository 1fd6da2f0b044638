"""Calibrates a model for int4 weights with the help of sample rows."""
