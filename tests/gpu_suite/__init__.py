"""What a GPU does with this: one command that tests, measures and records, `python -m tests.gpu_suite`.

Needs torch, triton, transformers and pyarrow, and pytest for its tests; no DuckDB, pydantic or numba, and no network.
"""
