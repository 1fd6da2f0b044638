"""Runs steps: the model on a device, and its sampler."""
