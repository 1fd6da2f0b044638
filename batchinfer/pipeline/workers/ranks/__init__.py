"""The processes of ranks: what several of them are to the one that leads, and each to itself."""
