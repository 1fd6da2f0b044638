"""Reads metadata and tensor positions of GGUF files, llama.cpp's model format."""
