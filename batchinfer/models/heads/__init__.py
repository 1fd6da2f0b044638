"""Draft heads, which propose a model's next tokens from its hidden states."""
