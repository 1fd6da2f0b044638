"""Facts about this machine (cores, memory, peak speeds, energy), and starting child processes."""
