"""Statistics of what was measured: fits and survival functions."""
