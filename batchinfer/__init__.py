"""Offline batch inference: a table of prompts in, a Parquet table of answers out."""

__version__ = "0.1.0"
