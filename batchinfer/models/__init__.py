"""Config-driven decoders and the loading of their weights."""
