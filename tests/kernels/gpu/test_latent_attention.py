"""The kernel for attention over latents equals its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu.latent_attention import latent_attention
from tests.kernels.cpu_steps import LatentStep, latent_step
from tests.kernels.gpu.poison import poisoned

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.3


def on_device(step: LatentStep, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return q, the cache and the table; and (sequence, position) of every query, as two tensors."""
    sequences = [row for row, (queries, _) in enumerate(step.chunks) for _ in range(queries)]
    positions = [at for queries, context in step.chunks for at in range(context - queries, context)]
    tensors = [tensor.to(device) for tensor in (step.q, step.k, step.table)]
    return tensors, [torch.tensor(of, device=device) for of in (sequences, positions)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "rank", "turned", "block_size", "chunks"),
    [
        (1, 1, 2, 1, [(1, 1), (3, 40), (1, 70)]),
        (4, 20, 8, 16, [(1, 1), (3, 40), (1, 70)]),
        (20, 64, 16, 5, [(1, 1), (3, 40), (1, 70)]),
        *(
            pytest.param(heads, rank, turned, 16, [(1, 33), (2, 130)], marks=pytest.mark.slow)
            for heads in (16, 33)
            for rank, turned in ((128, 32), (100, 20), (512, 64))
        ),
    ],
)
def test_equals_the_reference(device, dtype, heads, rank, turned, block_size, chunks):
    step = latent_step(1, heads, rank, turned, block_size, chunks).to(dtype)
    tensors, places = on_device(step, device)
    with poisoned():
        got = latent_attention(*tensors, *places, SCALE, rank)
    torch.testing.assert_close(got.cpu(), step.reference(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_row_does_not_depend_on_the_others(device):
    (q, cache, table), places = on_device(latent_step(2, 5, 20, 8, 16, [(1, 50), (4, 33), (1, 17)]), device)
    whole = latent_attention(q, cache, table, *places, SCALE, 20)
    for row in range(len(q)):
        at = slice(row, row + 1)
        alone = latent_attention(q[at], cache, table, *(of[at] for of in places), SCALE, 20)
        assert torch.equal(alone, whole[at])


def test_the_result_goes_where_it_is_wanted(device):
    tensors, places = on_device(latent_step(2, 5, 20, 8, 16, [(1, 50)]), device)
    out = torch.full((1, 5, 20), torch.nan, device=device)
    assert latent_attention(*tensors, *places, SCALE, 20, out) is out
    assert torch.equal(out, latent_attention(*tensors, *places, SCALE, 20))
    with pytest.raises(ValueError, match=r"out is \(1, 5, 28\)"):
        latent_attention(*tensors, *places, SCALE, 20, torch.empty_like(tensors[0]))
    with pytest.raises(ValueError, match="first 29 of 28"):
        latent_attention(*tensors, *places, SCALE, 29)
