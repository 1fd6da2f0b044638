"""Calibrates int4 weights. Only a job that calibrates imports these modules."""
