"""The KV cache: blocks, their layout, their memory."""
