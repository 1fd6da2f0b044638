"""Operators for the CPU, with the signatures of the references."""
