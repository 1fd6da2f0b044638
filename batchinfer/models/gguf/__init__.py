"""Models in GGUF files: maps their metadata and tensors to those of a supported family."""
