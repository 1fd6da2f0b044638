"""GGUF, the format in which llama.cpp keeps a model: what a file states, and where its tensors lie."""
