"""Operators of a decoder: one file each, with the torch reference that defines it and the cost that it declares.

Imports torch and triton at most, nothing of batchinfer. `cost` imports neither, so that planning needs no torch.
"""
