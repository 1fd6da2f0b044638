"""A suite of benchmark sections: each is measured in a process of its own, within its share of the time, on record."""
