"""Operators in Triton with the signatures of the references.

Each file holds the kernel of one operator and its launcher, which checks the arguments. Only this package imports
triton, which is not needed on a CPU.
"""
