"""Engines whose model is sharded across ranks. Each rank is a process; rank 0 leads."""
