"""Operators of a decoder: one file per operator, with its torch reference, and its cost in cost.py.

The package imports nothing from batchinfer. `cost` imports neither torch nor triton, so the planner can run without
them.
"""
