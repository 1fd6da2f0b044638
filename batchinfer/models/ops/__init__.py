"""The operators that a decoder calls, chosen once for the device."""
