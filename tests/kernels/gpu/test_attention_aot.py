"""The attention kernels compiled for GPUs: nothing spills, tensor cores multiply, and loads are wide."""

from __future__ import annotations

import re

import pytest

from tests.kernels.gpu.aot import NVIDIA, TARGETS, Compiled, compile_launch

CASES = "tests.kernels.gpu.attention_cases"
PRODUCTS = {"sm_80": r"\bmma\.sync", "sm_90": r"\bwgmma\.mma_async", "sm_100": r"\btcgen05\.mma"}
REGISTERS = r"\bmma\.sync"  # tiles of fewer rows than the larger instructions have
# window, soft cap (with sinks), codes
PLAIN = (None, None, None)
VARIANTS = [
    PLAIN,
    (100, 30.0, None),
    (None, None, "float8_e4m3fn"),
    (None, None, "int8"),
    (100, 30.0, "int8"),
]


def compiled(work: str, target: str, *arguments) -> list[Compiled]:
    longest = (8192,) if work == "decode" else ()
    found = compile_launch(f"{CASES}:launch_{work}", (*arguments, *longest), target)
    if target in NVIDIA:
        for kernel in found:
            kernel.check()
            if "merge" not in kernel.kernel:  # which has a value a thread where heads are small
                assert kernel.wide_loads() > 0, kernel.summary()
    return found


def named(found: list[Compiled], word: str) -> Compiled:
    (kernel,) = [k for k in found if word in k.kernel]
    return kernel


def assert_multiplies(kernel: Compiled, *instructions: str) -> None:
    assert any(re.search(i, kernel.ptx) for i in instructions), kernel.summary()


@pytest.mark.parametrize("target", TARGETS)
def test_prefill(target: str) -> None:
    (kernel,) = compiled("prefill", target, "bfloat16", 128, 4, 16, *PLAIN, False)
    if target in NVIDIA:
        assert_multiplies(kernel, PRODUCTS[target])
        assert kernel.wide_loads() >= 16, "q, and K and V in both loops"


@pytest.mark.parametrize("target", TARGETS)
def test_decode_with_prefixes(target: str) -> None:
    found = compiled("prefix", target, "bfloat16", 128, 4, 16, *PLAIN, False)
    assert len(found) == 3
    named(found, "merge_state")
    if target in NVIDIA:
        assert_multiplies(named(found, "prefix"), PRODUCTS[target])
        assert_multiplies(named(found, "decode"), REGISTERS)


def test_keys_are_fetched_ahead() -> None:
    """Asynchronous copies of 16 bytes: K and V of the next tiles travel while this one is multiplied."""
    kernel = named(compiled("decode", "sm_90", "bfloat16", 128, 4, 16, *PLAIN, False), "decode")
    assert len(re.findall(r"\bLDGSTS\.E\.(?:\w+\.)*128", kernel.sass)) >= 32


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_codes_are_widened_after_wide_loads(target: str) -> None:
    """float8_e4m3fn, which sm_80 does not know, is read as bits there."""
    (kernel,) = compiled("prefill", target, "bfloat16", 128, 4, 16, None, None, "float8_e4m3fn", False)
    assert_multiplies(kernel, PRODUCTS[target])


@pytest.mark.parametrize("work", ["prefill", "decode"])
def test_one_arithmetic_where_it_is_deterministic(work: str) -> None:
    kernel = named(compiled(work, "sm_90", "bfloat16", 128, 4, 16, *PLAIN, True), work)
    assert_multiplies(kernel, PRODUCTS["sm_90"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("target", TARGETS)
def test_sweep(target: str, dtype: str, dim: int, deterministic: bool, variant: tuple) -> None:
    for work, count in (("prefill", 1), ("prefix", 3)):
        found = compiled(work, target, dtype, dim, 4, 16, *variant, deterministic)
        assert len(found) == count
        if target in NVIDIA and dtype == "bfloat16":
            assert_multiplies(named(found, work), PRODUCTS[target], REGISTERS)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (3, 48), (8, 32), (16, 128)])
@pytest.mark.parametrize("target", TARGETS)
def test_groups_and_blocks(target: str, group: int, block_size: int) -> None:
    for deterministic in (False, True):
        compiled("prefill", target, "float16", 128, group, block_size, *PLAIN, deterministic)
        compiled("prefix", target, "float16", 128, group, block_size, *PLAIN, deterministic)
