"""What the hardware can do, what a run cost, and how close the two came. Plain numbers, no torch."""
