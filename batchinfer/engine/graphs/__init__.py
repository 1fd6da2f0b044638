"""CUDA graphs of steps, whole or in pieces."""
