"""Tests prefill attention for compute capability 9.0 against the reference.

Without such a GPU, a fake Gluon runs the kernel's own code. Deliberate mistakes in the kernel are found, too.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.gpu import hopper_prefill
from batchinfer_kernels.gpu.hopper_tiles import hopper_tokens, why_not
from batchinfer_kernels.gpu.prefill_attention import prefill_items
from batchinfer_kernels.paged_attention import ScoreRules
from tests.examples import examples
from tests.kernels.gpu.attention_cases import SCALE, Case, assert_near, paged_case
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.gluon_stand_in import Launcher

KERNEL = "_hopper_prefill_kernel"
ON_GPU = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
WINDOWS = (None, 16, 40, 150)
# Whole prompts, chunks after a cached part, and a first row just before the end of a tile
CHUNKS = ((3, 5), (40, 620), (10, 136), (128, 300))


def hidden(case: Case, window: int | None) -> Case:
    """Return the case with NaN in all keys outside of the window."""
    for row, (queries, context) in enumerate(case.chunks):
        size = case.k.shape[2]
        least = 0 if window is None else max(0, context - queries - window + 1)
        for key in range(least):
            for values in (case.k, case.v, *(case.scales or ())):
                nothing = torch.nan if values.is_floating_point() else 127
                values[case.table[row, key // size], :, key % size] = nothing
    return case


def attend(
    case: Case, module: ModuleType, seed: int | None, window: int | None, **rules: Any
) -> torch.Tensor:
    """Run prefill attention.

    Args:
        seed: seed of the fake's schedule; None to run on a GPU.
    """
    group = case.q.shape[1] // case.k.shape[1]
    items = torch.from_numpy(prefill_items(case.queries, case.contexts, hopper_tokens(group)))
    out = torch.full_like(case.q, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        if seed is not None:
            patch.setattr(module, KERNEL, Launcher(module, KERNEL, seed))
        places = (*case.tensors, items.to(case.q.device))
        module.hopper_prefill(*places, ScoreRules(SCALE, window, **rules), out=out, **case.scaling)
    return out


def check(case: Case, module: ModuleType, seed: int | None, window: int | None, **rules: Any) -> None:
    wanted, _ = case.reference(window, **rules)
    assert_near(attend(hidden(case, window), module, seed, window, **rules), wanted, case.q.dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int, int | None, dict[str, Any]]:
    """Draw (case, seed, window, rules)."""
    seed, heads = draw(st.integers(0, 2**16)), draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (1, 5), (1, 8)]))
    dim, size = draw(st.sampled_from([(64, 16), (128, 16), (80, 32), (128, 128), (256, 16), (48, 8)]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    codes = draw(st.sampled_from([None, torch.int8, torch.float8_e4m3fn] if dim <= 128 else [None]))
    chunk = st.tuples(st.integers(1, 70), st.integers(0, 300)).map(lambda told: (told[0], sum(told)))
    chunks = draw(st.lists(chunk, min_size=1, max_size=3))
    device = DEVICE if ON_GPU else "cpu"
    case = paged_case(chunks, heads[0], heads[1], dim, size, dtype, codes, seed, device)
    window = draw(st.sampled_from([window for window in WINDOWS if window is None or window >= size]))
    sinks = torch.linspace(-2.0, 3.0, case.q.shape[1], device=case.q.device)
    rules = {"soft_cap": draw(st.sampled_from([None, 1.5])), "sinks": draw(st.sampled_from([None, sinks]))}
    return case, seed, window, rules


@settings(max_examples=examples(4, 150), deadline=None, print_blob=True)
@given(cases())
def test_equals_the_reference(drawn: tuple[Case, int, int | None, dict[str, Any]]) -> None:
    case, seed, window, rules = drawn
    check(case, hopper_prefill, None if ON_GPU else seed, window, **rules)


Kind = tuple[int, torch.dtype | None, dict[str, Any]]  # heads that share a KV head, codes, rules
PLAIN: Kind = (2, None, {"window": None})
LIMITED: Kind = (2, None, {"window": 150, "sinks": torch.tensor([0.5, 3.0])})
NARROW: Kind = (1, None, {"window": 20})  # some rows see nothing of an item's first tile
CODED: Kind = (2, torch.int8, {"window": None})
TOTAL_READ = "total, p = warpgroup_mma_wait(0, deps=(total, p))\n        _empty"
# Possible mistakes of the kernel: (the case that reveals it, the right text, the wrong text)
WRONG = {
    "keys are not waited for": (PLAIN, "    _await(k_ring, i, STAGES)\n    tiles", "    tiles"),
    "a place is not waited for": (PLAIN, "    mbarrier.wait(empty.index(stage), (slot // STAGES) & 1 ^ 1)\n", ""),
    "the total is read early": (PLAIN, TOTAL_READ, TOTAL_READ.replace("(0", "(1")),
    "registers are reused": (PLAIN, TOTAL_READ, "total = warpgroup_mma_wait(0, deps=(total,))\n        _empty"),
    "the reader's phase": (PLAIN, "full.index(i % STAGES), (i // STAGES) & 1)", "full.index(i % STAGES), i & 1)"),
    "keys are not released": (PLAIN, "        _empty(k_ring, i, STAGES)\n", ""),
    "a barrier for one reader": (PLAIN, "count=READERS", "count=1"),
    "too few bytes are expected": (PLAIN, "desc.block_type.nbytes * PAGES", "desc.block_type.nbytes"),
    "queries without a fence": (PLAIN, "    fence_async_shared()", "    pass"),
    "the last page is not shifted": (PLAIN, "SIZE) - SIZE + gl.maximum", "0) + gl.maximum"),
    "a window of one more": (LIMITED, "key > row_at - window", "key >= row_at - window"),
    "no maximum": (NARROW, 'gl.where(higher == float("-inf"), 0.0, higher)', "higher"),
    "codes are not released": (CODED, "    mbarrier.arrive(code_empty.index(slot % STAGES))\n", ""),
    "scales past the last key": (CODED, "scale_at, mask=real, other=0.0", "scale_at"),
}  # fmt: skip


def fixed(group: int, codes: torch.dtype | None) -> Case:
    return paged_case(CHUNKS, 1, group, 64, 16, torch.float16, codes)


def changed_module(path: Path, old: str, new: str) -> ModuleType:
    source = Path(hopper_prefill.__file__).read_text()
    assert old in source
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", WRONG)
def test_mistakes_in_the_kernel_are_found(what: str, tmp_path: Path) -> None:
    (group, codes, rules), *change = WRONG[what]
    module = changed_module(tmp_path / "hopper_prefill_changed.py", *change)
    seed = random.randrange(2**16)
    print(f"seed {seed}")
    with pytest.raises((AssertionError, IndexError)):
        check(fixed(group, codes), module, seed, **rules)


def test_without_a_change_nothing_is_found() -> None:
    for group, codes, rules in (PLAIN, LIMITED, NARROW, CODED):
        check(fixed(group, codes), hopper_prefill, 0, **rules)


@pytest.mark.parametrize(
    ("dim", "size", "window", "codes", "reason"),
    [
        (100, 16, None, None, "head size 100"),
        (72, 16, None, torch.int8, "head size 72"),
        (256, 16, None, torch.float8_e4m3fn, "head size 256"),
        (128, 48, None, None, "block size 48"),
        (256, 128, None, None, "block size 128"),
        (128, 16, 15, None, "a window of 15"),
    ],
)
def test_unsupported_prefill_cases(
    dim: int, size: int, window: int | None, codes: torch.dtype | None, reason: str
) -> None:
    assert reason in str(why_not(dim, size, window, 2 if codes is None else 1))
    with pytest.raises(ValueError, match=reason):
        attend(paged_case(((3, 20),), 1, 1, dim, size, torch.float16, codes), hopper_prefill, 0, window)


def test_supported_prefill_cases() -> None:
    assert why_not(128, 16, None, 2) is None
    assert why_not(80, 128, 128, 1) is None
