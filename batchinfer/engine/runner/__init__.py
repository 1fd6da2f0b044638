"""What runs a step: the model on a device, and its sampler."""
