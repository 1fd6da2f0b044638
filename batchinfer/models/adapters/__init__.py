"""Adapters (LoRA): small changes of a model's weights, stored in folders of their own."""
