"""The operators that a model calls: one interface, one implementation a device, chosen once by `choose_ops`."""
