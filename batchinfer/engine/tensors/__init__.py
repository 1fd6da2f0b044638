"""The tensors of a step, on the host and on the device."""
