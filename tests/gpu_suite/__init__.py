"""Sections that measure a GPU, run by `python -m tests.gpu_suite`.

They need torch, triton, transformers and pyarrow, and pytest for the tests; no DuckDB, pydantic, numba or network.
"""

from __future__ import annotations

from functools import partial

from tests.suite.section import BenchModel, SuiteEntry

SMALL, LARGE = BenchModel("qwen2.5-0.5b"), BenchModel("llama-3.1-8b")
LARGE_BESIDE = BenchModel("llama-3.1-8b", 0.45)  # the competitor needs an equal amount
# Few rows, for a short capture
CODED = partial(BenchModel, "llama-3.1-8b", rows=64, longest=4352)


def _entry(
    calls: str, name: str, share: float, module: str | None = None, model: BenchModel | None = None
) -> SuiteEntry:
    return SuiteEntry(name, share, f"{__name__}.{module or name}", model, tuple(calls.split()))


# In three commands, each of nine minutes; the most valuable of each first. Shares are seconds; they are estimates until
# they have been seen on a GPU.
ENTRIES = (
    _entry("tests", "tests", 520, "kernel_tests"),
    _entry("kernels models", "peaks", 15),
    _entry("kernels", "attention", 110),
    _entry("kernels", "latents", 25),
    _entry("kernels", "tiles", 135),
    _entry("kernels", "matmul", 120),
    _entry("kernels", "pointwise", 30),
    _entry("kernels", "sampling", 45),
    _entry("models", "small-steady", 50, "steady", SMALL),
    _entry("models", "small-profile", 10, "profile", SMALL),
    _entry("models", "small-launching", 20, "launching", SMALL),
    _entry("models", "model", 60, "model", LARGE),
    _entry("models", "steady", 90, "steady", LARGE),
    _entry("models", "profile", 25, "profile", LARGE),
    _entry("models", "launching", 35, "launching", LARGE),
    _entry("models", "model-fp8", 45, "model", CODED(quantization="stored")),
    _entry("models", "model-kv-fp8", 30, "model", CODED(kv_cache="fp8")),
    _entry("models", "model-kv-int8", 30, "model", CODED(kv_cache="int8")),
    _entry("models", "against", 85, "against", LARGE_BESIDE),
    _entry("kernels models", "peaks-again", 20, "peaks"),
)
