"""An engine whose model is divided among several ranks: a process each, of which one leads."""
