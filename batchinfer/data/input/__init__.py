"""Input formats: one file each behind one protocol (protocol.py), listed in one registry (registry.py)."""
