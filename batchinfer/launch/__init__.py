"""Where the engine runs: a spawned process that the parent feeds and outlives."""
