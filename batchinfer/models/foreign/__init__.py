"""Models that batchinfer does not implement: transformers runs them over the engine's cache and attention."""
