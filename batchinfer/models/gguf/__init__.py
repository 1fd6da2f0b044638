"""Reads GGUF files: maps their metadata and tensors to the names of a supported family."""
