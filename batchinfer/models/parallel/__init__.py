"""A model that is sharded among several ranks."""
