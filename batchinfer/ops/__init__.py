"""What a model calls. One interface, one implementation per kind of device, chosen once by `choose_ops`."""
