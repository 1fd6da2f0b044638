"""The KV cache: block pool, layout and memory."""
