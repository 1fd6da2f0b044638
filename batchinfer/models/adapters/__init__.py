"""Adapters: small changes of a model's weights, stored apart (LoRA)."""
