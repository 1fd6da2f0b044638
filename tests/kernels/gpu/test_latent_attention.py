"""The kernel for attention over latents equals its reference."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.gpu.latent_attention import latent_attention
from batchinfer_kernels.latent_attention import latent_attention_reference
from tests.kernels.gpu.aot import TARGETS, compile_launch
from tests.kernels.gpu.pairs import each_first
from tests.kernels.gpu.poison import poisoned
from tests.kernels.test_paged_attention import poisoned_case

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.3


def places(chunks, device):
    """(sequence, position) of every query."""
    sequences = [row for row, (queries, _) in enumerate(chunks) for _ in range(queries)]
    positions = [at for queries, context in chunks for at in range(context - queries, context)]
    return torch.tensor(sequences, device=device), torch.tensor(positions, device=device)


def check(device, dtype, heads, rank, turned, block_size, chunks) -> None:
    q, (cache, _), table = poisoned_case(1, heads, 1, rank + turned, block_size, chunks)
    q, cache, table = q.to(dtype).to(device), cache.to(dtype).to(device), table.to(device)
    with poisoned():
        got = latent_attention(q, cache, table, *places(chunks, device), SCALE, rank)
    lens = [n for n, _ in chunks], [c for _, c in chunks]
    wanted = latent_attention_reference(q, cache, table, *lens, SCALE, rank)
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "rank", "turned", "block_size"), [(1, 1, 2, 1), (4, 20, 8, 16), (20, 64, 16, 5)]
)
def test_equals_the_reference(device, dtype, heads, rank, turned, block_size):
    check(device, dtype, heads, rank, turned, block_size, [(1, 1), (3, 40), (1, 70)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [16, 33])
@pytest.mark.parametrize(("rank", "turned"), [(128, 32), (100, 20), (512, 64)])
def test_equals_the_reference_at_all_sizes(device, dtype, heads, rank, turned):
    check(device, dtype, heads, rank, turned, 16, [(1, 33), (2, 130)])


def test_a_row_does_not_depend_on_the_others(device):
    chunks = [(1, 50), (4, 33), (1, 17)]
    q, (cache, _), table = poisoned_case(2, 5, 1, 28, 16, chunks)
    q, cache, table = q.to(device), cache.to(device), table.to(device)
    sequences, positions = places(chunks, device)
    whole = latent_attention(q, cache, table, sequences, positions, SCALE, 20)
    for row in range(len(q)):
        at = slice(row, row + 1)
        assert torch.equal(
            latent_attention(q[at], cache, table, sequences[at], positions[at], SCALE, 20), whole[at]
        )


def test_what_does_not_fit_is_refused(device):
    q, (cache, _), table = poisoned_case(2, 5, 1, 28, 16, [(1, 50)])
    with pytest.raises(ValueError, match="first 29 of 28"):
        latent_attention(q, cache, table, *places([(1, 50)], "cpu"), SCALE, 29)


def test_the_result_goes_where_it_is_wanted(device):
    q, (cache, _), table = poisoned_case(2, 5, 1, 28, 16, [(1, 50)])
    q, cache, table = q.to(device), cache.to(device), table.to(device)
    where = places([(1, 50)], device)
    out = torch.full((1, 5, 20), torch.nan, device=device)
    assert latent_attention(q, cache, table, *where, SCALE, 20, out) is out
    assert torch.equal(out, latent_attention(q, cache, table, *where, SCALE, 20))
    with pytest.raises(ValueError, match=r"out is \(1, 5, 28\)"):
        latent_attention(q, cache, table, *where, SCALE, 20, torch.empty_like(q))


def launch(dtype: str, heads: int, rank: int, turned: int) -> None:
    cache = torch.zeros(4, 1, 16, rank + turned, dtype=getattr(torch, dtype))
    q = torch.zeros(8, heads, rank + turned, dtype=cache.dtype)
    table, rows = torch.zeros(8, 64, dtype=torch.int32), torch.arange(8)
    latent_attention(q, cache, table, rows, rows, SCALE, rank)


@pytest.mark.parametrize(("target", "dtype"), each_first(TARGETS, ["bfloat16", "float32"]))
def test_compiles(target, dtype):
    """At the sizes of DeepSeek-V3."""
    (found,) = compile_launch("tests.kernels.gpu.test_latent_attention:launch", (dtype, 128, 512, 64), target)
    found.check()
