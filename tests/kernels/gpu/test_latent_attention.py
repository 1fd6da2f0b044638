"""Compares the kernels for attention over latents with their reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu import attention_splits, part_room
from batchinfer_kernels.gpu import latent_attention as kernels
from batchinfer_kernels.gpu.attention_plan import AttentionShape, LaunchPlan, Room, plan_attention
from batchinfer_kernels.gpu.latent_attention import latent_attention
from batchinfer_kernels.gpu.latent_tiles import chunk_tokens, latent_tiles
from tests.kernels.cpu_steps import LatentStep, latent_step
from tests.kernels.gpu.poison import poisoned
from tests.kernels.refused import assert_refused

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.3
SMALL = (20, 8, 16)  # rank, rotated values, block size


def planned(
    step: LatentStep, device: str = "cpu", deterministic: bool = False, room: Room | None = None
) -> LaunchPlan:
    (_, heads, width), dtype = step.q.shape, step.q.dtype
    shape = AttentionShape(dtype, heads, 1, width, deterministic, latent=True)
    return plan_attention(step.queries, step.contexts, shape, device, room=room)


def attended(step: LatentStep, device: str, plan: LaunchPlan | None = None, **how) -> Tensor:
    plan = plan or planned(step, device, **how)
    tensors = [tensor.to(device) for tensor in (step.q, step.k, step.table)]
    with poisoned():
        return latent_attention(*tensors, plan, SCALE, step.rank).cpu()


def assert_right(found: Tensor, step: LatentStep) -> None:
    tolerance = TOLERANCE[step.q.dtype]
    torch.testing.assert_close(found, step.reference(), atol=tolerance, rtol=tolerance)


MIXED = [(1, 1), (3, 40), (1, 70)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "rank", "turned", "block_size", "chunks"),
    [
        (1, 1, 2, 1, MIXED),
        (4, 20, 8, 16, [(1, 1), (19, 40), (1, 600)]),  # more tokens than an item has, a row in parts
        (20, 64, 16, 5, MIXED),
        (70, 20, 8, 16, MIXED),  # more heads than a program has
        (128, 20, 8, 16, [(1, 1), (2, 20)]),  # and several whole ones of one token
        *(
            pytest.param(heads, rank, turned, 16, [(1, 33), (2, 130), (1, 700)], marks=pytest.mark.slow)
            for heads in (16, 33, 128)
            for rank, turned in ((128, 32), (100, 20), (512, 64))
        ),
    ],
)
def test_equals_the_reference(device, dtype, heads, rank, turned, block_size, chunks):
    step = latent_step(1, heads, rank, turned, block_size, chunks).to(dtype)
    assert_right(attended(step, device), step)


def test_rows_that_are_long_are_attended_in_parts(device, monkeypatch):
    monkeypatch.setattr("batchinfer_kernels.gpu.attention_launch.processors", lambda _: 4)
    monkeypatch.setattr("batchinfer_kernels.gpu.part_room.processors", lambda _: 4)
    step = latent_step(2, 5, *SMALL, [(1, 900), (1, 30), (1, 257)])
    plan = planned(step, device)
    assert plan.splits_of(None).places.diff().tolist() == [4, 1, 2]
    assert_right(attended(step, device, plan), step)


@pytest.mark.sample(1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [3, 24])
def test_few_queries_of_a_graph_share_reads(device, heads, deterministic):
    """Rows of verified drafts: sequences have up to four queries, one has none, one is split, one is padding."""
    chunks = [(4, 50), (1, 1), (2, 1100), (0, 33), (3, 3)]
    step = latent_step(3, heads, *SMALL, chunks)
    plan = planned(step, device, deterministic, Room(2048, queries=4))
    assert plan.items is None
    assert not plan.splits_of(None).whole
    assert_right(attended(step, device, plan), step)


def test_padding_of_a_graph_gives_no_nan(device):
    step = latent_step(4, 3, *SMALL, [(1, 40), (1, 300)])
    padded = replace(
        step,
        q=torch.cat((step.q, torch.full_like(step.q[:1], torch.nan))),
        table=torch.cat((step.table, step.table[:1])),
        chunks=[*step.chunks, (1, 0)],
    )
    found = attended(padded, device, room=Room(512))
    assert_right(found[:2], step)
    assert torch.equal(found[2], torch.zeros_like(found[2]))


def test_a_graphs_list_serves_longer_contexts(device):
    """A plan for shorter contexts is refilled: only numbers on the device change."""
    late = latent_step(5, 3, *SMALL, [(1, 301), (1, 47)])
    early = replace(late, chunks=[(1, 290), (1, 36)])
    room = Room(512)
    plan = planned(early, device, room=room)
    plan.place()
    tensors = [array.tensor for array in plan.held.values()]
    grown = plan.refilled(plan.grown(late.contexts))
    assert [array.tensor.data_ptr() for array in grown.held.values()] == [one.data_ptr() for one in tensors]
    assert_right(attended(late, device, grown), late)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [5, 20])
def test_deterministic_bits_do_not_depend_on_other_rows(device, monkeypatch, dtype, heads):
    """In one chunk, in chunks, row by row, with and without a graph, with segments of 32 keys."""
    for module in (kernels, attention_splits, part_room):
        monkeypatch.setattr(module, "SEGMENT", 32)
    step = latent_step(6, heads, *SMALL, [(1, 50), (9, 70), (1, 17)]).to(dtype)
    whole = attended(step, device, deterministic=True)
    assert_right(whole, step)
    for row, (queries, _) in enumerate(step.chunks):
        start = sum(step.queries[:row])
        for size in (1, 4):
            for first in range(0, queries, size):
                part = step.part(row, first, min(size, queries - first))
                wanted = whole[start + first : start + first + len(part.q)]
                assert torch.equal(attended(part, device, deterministic=True), wanted), (row, first, size)
                few = attended(part, device, deterministic=True, room=Room(128, queries=size))
                assert torch.equal(few, wanted), (row, first, size)


def test_a_row_does_not_depend_on_other_rows(device):
    """For rows that are not split, also without deterministic mode."""
    step = latent_step(2, 5, *SMALL, [(1, 50), (1, 33), (1, 17)])
    whole = attended(step, device)
    for row in range(len(step.chunks)):
        assert torch.equal(attended(step.part(row, 0, 1), device), whole[row : row + 1])


def test_the_result_is_written_to_the_given_tensor(device):
    step = latent_step(2, 5, *SMALL, [(1, 50)])
    tensors, plan = [tensor.to(device) for tensor in (step.q, step.k, step.table)], planned(step, device)
    out = torch.full((1, 5, 20), torch.nan, device=device)
    assert latent_attention(*tensors, plan, SCALE, 20, out) is out
    assert torch.equal(out, latent_attention(*tensors, plan, SCALE, 20))
    with pytest.raises(ValueError, match=r"out is \(1, 5, 28\)"):
        latent_attention(*tensors, plan, SCALE, 20, torch.empty_like(tensors[0]))
    assert_refused("29 of 28", latent_attention, *tensors, plan, SCALE, 29)
    assert_refused("must be greater than 0", latent_attention, *tensors, plan, 0.0, 20)


@pytest.mark.parametrize("heads", [1, 3, 16, 20, 64, 100, 128])
def test_a_tile_is_filled_with_heads_of_tokens(heads):
    """For a prompt, and for a token with that number of heads: a tile has at most 64 rows, at least half of
    them real."""
    rows = chunk_tokens(heads) * heads
    tiles = latent_tiles(torch.bfloat16, 512, rows, False)
    assert tiles.rows == 64
    assert rows / (-(-rows // tiles.rows) * tiles.rows) > 0.5
    assert latent_tiles(torch.bfloat16, 512, heads, False).rows < max(2 * heads, 17)
    assert latent_tiles(torch.bfloat16, 512, rows, True) == latent_tiles(torch.bfloat16, 512, heads, True)
