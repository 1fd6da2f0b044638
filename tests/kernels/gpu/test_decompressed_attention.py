"""Compares the kernel for attention with decompressed latents with its reference, and compiles it."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu.decompressed_attention import decompressed_attention, decompressed_tokens
from batchinfer_kernels.gpu.prefill_attention import prefill_items
from batchinfer_kernels.latent_attention import decompressed_attention_reference
from tests.examples import first_of
from tests.kernels.gpu.aot import NVIDIA, TARGETS, compile_launch
from tests.kernels.gpu.test_attention_aot import PRODUCTS, REGISTERS
from tests.kernels.gpu.test_latent_attention import SCALE, TOLERANCE
from tests.kernels.refused import assert_refused

Lens = list[tuple[int, int]]  # queries, context


def operands(chunks: Lens, heads: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and shared values as slices of wider rows, with NaN after the keys."""
    torch.manual_seed(heads)
    plain, turned, value = sizes
    tokens, keys = (sum(one) for one in zip(*chunks, strict=True))
    q = torch.randn(tokens, heads, plain + turned)
    made = [torch.randn(heads, keys + 3, dim) for dim in (plain, value)]
    shared = torch.randn(keys + 3, 5 + turned)
    for one in (*made, shared[None]):
        one[:, keys:] = torch.nan
    return [one.to(dtype) for one in (q, *made, shared[:, 5:])]


def items_of(chunks: Lens, dtype: torch.dtype) -> Tensor:
    queries, contexts = zip(*chunks, strict=True)
    items = prefill_items(queries, contexts, decompressed_tokens(dtype))
    firsts = torch.tensor([0, *contexts]).cumsum(0)
    found = torch.from_numpy(items)
    found[:, 0] = firsts[found[:, 0].long()]
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "sizes", "chunks"),
    [
        (3, (12, 8, 10), [(5, 5), (1, 1), (40, 77)]),
        (2, (32, 16, 32), [(150, 150), (3, 130)]),  # more tokens than an item has
        pytest.param(5, (128, 64, 128), [(130, 300), (64, 64), (200, 200)], marks=pytest.mark.slow),
    ],
)
def test_equals_the_reference(device, dtype, heads, sizes, chunks):
    q, k, v, shared = (one.to(device) for one in operands(chunks, heads, sizes, dtype))
    out = torch.full((*q.shape[:2], sizes[2]), torch.nan, dtype=dtype, device=device)
    decompressed_attention(q, k, v, shared, items_of(chunks, dtype).to(device), SCALE, out)
    lens, contexts = ([*of] for of in zip(*chunks, strict=True))
    keys = sum(contexts)
    read = k[:, :keys], v[:, :keys], shared[:keys]
    wanted = decompressed_attention_reference(q, *read, lens, contexts, SCALE)
    torch.testing.assert_close(out, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_wrong_operands_are_refused(device):
    q, k, v, shared = (one.to(device) for one in operands([(5, 5)], 3, (12, 8, 10), torch.float32))
    out, items = (
        torch.full((5, 3, 10), torch.nan, device=device),
        items_of([(5, 5)], torch.float32).to(device),
    )
    decompressed_attention(q, k, v, shared, items[:0], SCALE, out)
    assert out.isnan().all(), "rows without an item are unchanged"
    for wrong in (
        (q[..., 1:], k, v, shared),
        (q, k, v[:, 1:], shared),
        (q, k, v.half(), shared),
        (q, k, v, k),
    ):
        assert_refused(r"q is|shared is|dimensions", decompressed_attention, *wrong, items, SCALE, out)
    assert_refused(r"out is \(5, 3, 8\)", decompressed_attention, q, k, v, shared, items, SCALE, out[..., :8])
    assert_refused("must be greater than 0", decompressed_attention, q, k, v, shared, items, -1.0, out)


def launch_decompressed(dtype: str, plain: int, turned: int, value: int) -> None:
    chunks, kind = [(64, 64)], getattr(torch, dtype)
    q, *read = operands(chunks, 16, (plain, turned, value), kind)
    out = torch.zeros(64, 16, value, dtype=kind)
    decompressed_attention(q, *read, items_of(chunks, kind), SCALE, out)


@pytest.mark.parametrize(
    ("target", "dtype", "sizes"),
    first_of(
        [
            ("sm_90", "bfloat16", (128, 64, 128)),
            *product(TARGETS, ("bfloat16", "float16", "float32"), [(128, 64, 128)]),
            *product(TARGETS, ["bfloat16"], [(72, 16, 96)]),
        ],
        1,
    ),
)
def test_compiles(target: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    (kernel,) = compile_launch(
        "tests.kernels.gpu.test_decompressed_attention:launch_decompressed", (dtype, *sizes), target
    )
    kernel.check()
    if target in NVIDIA:
        assert kernel.wide_loads() > 0, kernel.summary()
        assert re.search(PRODUCTS[target] if dtype != "float32" else REGISTERS, kernel.ptx), kernel.summary()
