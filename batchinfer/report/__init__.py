"""The report of a run: its cost, and how near it came to what the hardware can do. Plain numbers, no torch."""
