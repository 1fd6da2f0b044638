"""Operators in Triton, with the signatures of the references.

One file per operator: the kernel, and the launcher that checks what it is given. Only this package imports triton,
which neither a Mac nor a machine that runs on its CPU needs.
"""
