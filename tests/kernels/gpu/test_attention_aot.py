"""Compiles attention kernels for GPUs: nothing spills, tensor cores multiply, and loads are wide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import pytest

from tests.examples import first_of
from tests.kernels.gpu.aot import NVIDIA, STACK_LIMIT, TARGETS, Compiled, compile_launch

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
KINDS = {2: ("bfloat16", "float16"), 4: ("float32",)}
PADDED = {64: (48, 64), 128: (72, 80, 96, 112, 128), 256: (160, 192, 256)}
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
BLOCKS = (16, 32, 48, 64, 128)
# Bytes of stack on sm_80 with 7 query heads for each KV head: up to 16 values spill there, with triton 3.7
STACK_OF_SEVEN = 64


def compiled(work: str, target: str, *arguments, stack: int = STACK_LIMIT) -> list[Compiled]:
    found = compile_launch(f"{CASES}:launch_{work}", arguments, target)
    for kernel in found:
        kernel.check(stack=stack)
        # For small heads, a thread has one value of the merged result
        if target in NVIDIA and "merge" not in kernel.kernel:
            assert kernel.wide_loads() > 0, kernel.summary()
    return found


def named(found: list[Compiled], word: str) -> Compiled:
    """Return the last compiled kernel with `word` in its name."""
    return [k for k in found if word in k.kernel][-1]


def assert_multiplies(kernel: Compiled, *instructions: str) -> None:
    assert any(re.search(i, kernel.ptx) for i in instructions), kernel.summary()


def in_flight(kernel: Compiled) -> int:
    """Return the maximum number of copies to shared memory that a loop leaves in flight when it waits."""
    return max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.ptx)), default=0)


SM_90_FIRST = first_of(("sm_90", *(target for target in TARGETS if target != "sm_90")), 1)


@pytest.mark.parametrize("target", SM_90_FIRST)
def test_prefill(target: str) -> None:
    (kernel,) = compiled("prefill", target, "bfloat16", 128, 4, 16, *PLAIN, False)
    if target in NVIDIA:
        assert_multiplies(kernel, PRODUCTS[target])
        assert kernel.wide_loads() >= 16, "q, and K and V in both loops"
    if target == "sm_90":
        assert in_flight(kernel) == 3, "a loop waits for the tile that it multiplies, not for later ones"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "dim", "window", "distances"),
    list(product(TARGETS, ("bfloat16", "float32"), (64, 256), (None, 64), (False, True))),
)
def test_encoder(target: str, dtype: str, dim: int, window: int | None, distances: bool) -> None:
    """MiniLM and BGE, MPNet (distances), ModernBERT (windows), EmbeddingGemma (heads of 256)."""
    (kernel,) = compiled("encoder", target, dtype, dim, 1, 16, window, distances, None, False)
    if target in NVIDIA and dtype == "bfloat16":
        assert_multiplies(kernel, PRODUCTS[target], REGISTERS)


@pytest.mark.parametrize("target", SM_90_FIRST)
def test_decode_with_prefixes(target: str) -> None:
    found = compiled("prefix", target, "bfloat16", 128, 4, 16, *PLAIN, False)
    assert len(found) == 3
    named(found, "merge_state")
    if target in NVIDIA:
        assert_multiplies(named(found, "prefix"), PRODUCTS[target])
        assert_multiplies(named(found, "decode"), REGISTERS)
    if target == "sm_90":
        assert in_flight(named(found, "prefix")) == 3
        copies = re.findall(r"\bLDGSTS\.E\.(?:\w+\.)*128", named(found, "decode").sass)
        assert len(copies) >= 32, "K and V of the next tiles travel while this one is multiplied"


@pytest.mark.slow
@pytest.mark.parametrize(("work", "dim", "codes"), [("prefill", 64, "int8"), ("prefix", 256, None)])
def test_products_do_not_wait_for_all_keys_in_flight(work: str, dim: int, codes: str | None) -> None:
    """Quantised values bring their scales."""
    found = compiled(work, "sm_90", "bfloat16", dim, 4, 16, None, None, codes, False)
    assert in_flight(named(found, work)) == (3 if codes is None else 6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", first_of(("sm_90", "sm_80", "sm_100"), 2))
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_decode_converts_two_quantised_values_at_once(codes: str, target: str) -> None:
    """Values are not converted one by one, the hardware transposes V, and shared memory is not read byte by
    byte."""
    found = compiled("decode", target, "bfloat16", 128, 4, 16, None, None, codes, False)
    kernel = named(found, "decode")
    assert_multiplies(kernel, r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32")
    for slow in ("F2F.", "I2F.S8", "LDS.U8", "LDS.S8", "LDG.E.U"):
        assert f" {slow}" not in kernel.sass, slow
    assert ".MT88.4" in kernel.sass
    assert ("cvt.rn.f16x2.e4m3x2" in kernel.ptx) == (codes != "int8" and target != "sm_80")


@pytest.mark.parametrize(
    ("target", "queries", "group", "codes", "deterministic"),
    first_of(
        [
            ("sm_90", 4, 4, None, False),
            ("sm_80", 8, 4, "int8", False),
            *(
                (target, *sizes, codes, deterministic)
                for target in NVIDIA
                for sizes in ((2, 4), (8, 7), (8, 8))
                for codes in (None, "float8_e4m3fn")
                for deterministic in (False, True)
            ),
        ],
        1,
    ),
)
def test_several_queries_a_sequence_and_trees_of_drafts(
    target: str, queries: int, group: int, codes: str | None, deterministic: bool
) -> None:
    """A separate loop skips the keys after which trees may begin: the main loop has the usual number of loads
    in flight. 64 rows use the larger instructions."""
    sizes = ("bfloat16", 128, group, 16)
    of_trees, plain = (
        compiled("few", target, queries, *sizes, None, None, codes, deterministic, branching)
        for branching in (True, False)
    )
    assert in_flight(named(of_trees, "decode")) == in_flight(named(plain, "decode"))
    assert "merge" in plain[-1].kernel
    # A tile of a deterministic kernel has 64 rows for any number of queries
    larger = PRODUCTS[target] if deterministic or queries * group > 32 else REGISTERS
    assert_multiplies(named(plain, "decode"), larger)
    stack = STACK_OF_SEVEN if (target, group) == ("sm_80", 7) else STACK_LIMIT
    (kernel,) = compiled("tree", target, *sizes, None, codes, deterministic, stack=stack)
    assert_multiplies(kernel, PRODUCTS[target], REGISTERS)


def swept() -> Iterator[Any]:
    """Yield cases that cover all parameters of register use: target, value size, padded head size, mode,
    variant.

    Dtype, head size, group and block size are drawn: all combinations would be 60 000 cases.
    """
    draw = Random(0).choice
    for target, kind, padded, deterministic, variant in product(
        TARGETS, KINDS, PADDED, (False, True), VARIANTS
    ):
        sizes = (draw(KINDS[kind]), draw(PADDED[padded]), draw(GROUPS), draw(BLOCKS))
        name = "-".join(map(str, (target, *sizes, deterministic, variant)))
        yield pytest.param(target, sizes, deterministic, variant, id=name)


Sizes = tuple[str, int, int, int]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "sizes", "deterministic", "variant"), list(swept()))
def test_sweep(target: str, sizes: Sizes, deterministic: bool, variant: tuple) -> None:
    stack = STACK_OF_SEVEN if (target, sizes[2]) == ("sm_80", 7) else STACK_LIMIT
    for work, count in (("prefill", 1), ("prefix", 3)):
        found = compiled(work, target, *sizes, *variant, deterministic, stack=stack)
        assert len(found) == count
        if target in NVIDIA and sizes[0] != "float32":
            assert_multiplies(named(found, work), PRODUCTS[target], REGISTERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "target", "dtype", "dim", "codes", "deterministic"),
    [
        ("prefill", "sm_80", "float16", 112, "float8_e4m3fn", True),
        ("prefill", "sm_80", "bfloat16", 64, "int8", True),
        ("decode", "sm_100", "bfloat16", 80, "int8", False),
    ],
)
def test_registers_suffice_in_the_largest_cases(
    work: str, target: str, dtype: str, dim: int, codes: str, deterministic: bool
) -> None:
    """Scales and masks need registers, too."""
    compiled(work, target, dtype, dim, 2, 128, 100, 30.0, codes, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "sizes", "deterministic", "variant"), [case for case in swept() if case.values[3][0] is None]
)
def test_sweep_of_trees(target: str, sizes: Sizes, deterministic: bool, variant: tuple) -> None:
    # With two loops and separate sums, some kernels spill eight values
    stack = 2 * STACK_LIMIT if deterministic else STACK_LIMIT
    assert len(compiled("tree", target, *sizes, *variant[1:], deterministic, stack=stack)) == 1
    few = compiled("few", target, 8, *sizes, *variant, deterministic, True, stack=stack)
    assert len(few) == (4 if deterministic else 3), "unsplit rows are merged where the mode says so"
