"""CUDA graphs of whole decode steps, and of pieces of steps with prompts."""
