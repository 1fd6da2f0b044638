"""The engine on a runner that only counts."""
