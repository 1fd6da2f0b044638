"""Models in GGUF files: their configuration and their tensors, as one of our families has them."""
