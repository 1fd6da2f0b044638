"""The decoder that runs the models of all supported families."""
