"""Heads that were trained for a model, and propose its next tokens from its hidden states."""
